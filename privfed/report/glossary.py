"""What the words of a report mean, for people who do not work with them every day."""

GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "epsilon",
        "Bound on what anybody can learn about one record from everything that was released. 0 is nothing; it adds up over rounds.",
    ),
    ("delta", "Probability with which the bound may fail. It has to be far below one over the number of records."),
    ("noise multiplier", "Standard deviation of the noise in a training step, relative to the most that one record can add to it."),
    ("canary", "A made-up record that is attacked in place of a real one, so that success can be measured and shown."),
    ("guessing", "What somebody reaches who never saw the update, and says the most typical record, or label, every time."),
    (
        "score",
        "Share of what the attack said that is right. It can be below guessing: an attack under noise is misled, and can be wrong more "
        "often than somebody who says what is most frequent.",
    ),
    ("certified, proven exact", "The attack proved, from the update alone, that a record it read is exactly one that was trained on."),
    ("control", "The same attack where the protection is taken away on purpose. If it fails there, its failing elsewhere means nothing."),
    ("trust mode", "Who holds the key. SharedKey: every client, never the server. Plaintext: nobody, there is no encryption."),
    ("aggregate, sum", "The weighted mean of the clients' updates: the only thing that is decrypted, once per round."),
    (
        "effective clients",
        "How many clients of equal weight a sum with these weights is worth: 3 clients, one with nearly all weight, are 1.",
    ),
    ("grid step", "Updates are rounded to a fixed grid before encryption, so that decrypting is exact: 0 grid steps off is exactly equal."),
    ("PR-AUC", "Average precision of the fraud model: 1 is perfect, a model that guesses reaches the share of frauds."),
)
