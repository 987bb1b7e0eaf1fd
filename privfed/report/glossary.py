"""What the words of a report mean, for people who do not work with them every day."""

GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "epsilon",
        "Limit on how much one record can change what anybody sees. 0: nothing can be learned about it. It grows with every round; the "
        "budget is where a client stops.",
    ),
    (
        "delta",
        "Allowance for the limit to fail. It has to be below one over the number of records, or else giving one away at random would "
        "be allowed.",
    ),
    (
        "noise multiplier",
        "Standard deviation of the noise in a training step, relative to the most that one record can add to that step. More is safer.",
    ),
    ("clipping norm", "What each record's part in a training step is cut down to before noise is added."),
    ("update", "How training at one client changed the model. Without protection, records can be read from it."),
    ("aggregate, sum", "The weighted mean of the clients' updates: what is opened in a round, and makes the next model."),
    (
        "trust mode",
        "Who holds the key. SharedKey: every client, never the server. EscrowKey: one key holder, beside clients and server. ThresholdKey: "
        "nobody; so many clients open a sum together, and the server learns it. Plaintext: there is no encryption.",
    ),
    (
        "canary",
        "A made-up record that is attacked in place of a real one, so that success can be measured, and shown.",
    ),
    ("cell", "One value of a record, such as its amount."),
    (
        "guessing",
        "What somebody reaches who saw nothing of the round, and says what is typical, or draws from what is frequent: the better of both.",
    ),
    (
        "gain, points",
        "Score minus guessing, in percentage points, with the interval in which it lies with 95% confidence, all audited attacks taken "
        "together. An attack is better than guessing if all of the interval is above zero, or if it certified a record; it is no better "
        "if the interval excludes what reading one record in every second batch would gain; else there are too few batches to tell.",
    ),
    (
        "worse than guessing",
        "An attack believes what it sees, noise included, and noise misleads it. That is no further protection: it could guess instead.",
    ),
    (
        "certified, false certificate",
        "The attack showed from the update alone, without the truth, what a record is: every number to within 1% of its column's range. A "
        "false certificate is about no record: noise led the proof astray, and nothing was read.",
    ),
    (
        "protection taken away",
        "A control: the same attacks without noise, and with the key. If they fail there too, that they fail here says nothing.",
    ),
    (
        "effective clients",
        "How many clients of equal weight a sum is worth: 3 clients, one of which has nearly all the weight, are 1.",
    ),
    ("coefficient", "The whole number by which a client's update is multiplied in the sum."),
    ("grid step", "Updates are rounded to a fixed grid before encryption; 0 grid steps of difference are exact equality."),
    ("PR-AUC", "Average precision of the model: 1 is perfect; a model that guesses reaches the share of positive records."),
)
