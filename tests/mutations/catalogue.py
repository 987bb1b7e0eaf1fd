"""Faults that the suite must notice, as exact replacements in the source, each with the tests that are to fail."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A planted fault.

    Args:
        name: What is wrong with it.
        path: Source file.
        before: Text that is in it once.
        after: What takes its place.
        tests: Test files that are to fail.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


CATALOGUE: tuple[Mutation, ...] = (
    Mutation(
        "records are not clipped (book-keeping)",
        "privfed/training/bookkeeping.py",
        "clip_factors(norms, max_grad_norm=self.max_grad_norm), total.split(self._sizes))",
        "torch.ones_like(norms), total.split(self._sizes))",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "the clipping factor is not bounded by 1",
        "privfed/training/gradients.py",
        "    return max_grad_norm / norms.clamp(min=max_grad_norm)",
        "    return max_grad_norm / norms",
        ("tests/training/test_gradients.py", "tests/training/test_dpsgd.py"),
    ),
    Mutation(
        "half of the noise",
        "privfed/training/dpsgd.py",
        ".mul_(self.noise_multiplier * self.max_grad_norm / grid)",
        ".mul_(0.5 * self.noise_multiplier * self.max_grad_norm / grid)",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "the mean is noised in place of the sum",
        "privfed/training/dpsgd.py",
        ".mul_(self.noise_multiplier * self.max_grad_norm / grid)",
        ".mul_(self.noise_multiplier * self.max_grad_norm / grid / self.expected_batch_size)",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "the noised sum is not rounded to its grid",
        "privfed/training/dpsgd.py",
        "alpha=1 / grid).round_().mul_(grid)",
        "alpha=1 / grid).mul_(grid)",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "more records than declared are trained on",
        "privfed/training/dpsgd.py",
        "len(samples) > mechanism.record_limit",
        "len(samples) > 2 * mechanism.record_limit",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "a batch is drawn at another rate than is charged",
        "privfed/training/dpsgd.py",
        "sample_rate=mechanism.sample_rate, steps=mechanism.steps):",
        "sample_rate=min(1.0, 1.5 * mechanism.sample_rate), steps=mechanism.steps):",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "records are not clipped (hooks)",
        "privfed/training/dpsgd.py",
        "            factors = clip_factors(norms[here], max_grad_norm=self.max_grad_norm)\n",
        "            factors = torch.ones_like(norms[here])\n",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "records are not clipped (compiled)",
        "privfed/training/compiled.py",
        "kept * clip_factors(norms, max_grad_norm=self.max_grad_norm)",
        "kept",
        ("tests/training/test_compiled.py",),
    ),
    Mutation(
        "the norm forgets the bias",
        "privfed/training/bookkeeping.py",
        "of_inputs.add_(self._biases).mul_(of_derivatives)",
        "of_inputs.mul_(of_derivatives)",
        ("tests/training/test_gradients.py",),
    ),
    Mutation(
        "the sum is divided by the size of the batch",
        "privfed/training/dpsgd.py",
        "        weights.summed_grad = clipped.values\n",
        "        weights.summed_grad = clipped.values * (mechanism.expected_batch_size / max(1, len(batch)))\n",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "an empty batch is a step without noise",
        "privfed/training/dpsgd.py",
        "        zeroed += clipped.zeroed\n",
        "        zeroed += clipped.zeroed\n        if not len(batch):\n            continue\n",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "the noise of one draw is used again",
        "privfed/training/randomness.py",
        "        return _encryptor(os.urandom(32)).update(bytes(count))\n",
        "        return _encryptor(bytes(32)).update(bytes(count))\n",
        ("tests/training/test_randomness.py",),
    ),
    Mutation(
        "noise in multiples of another norm than was clipped to",
        "privfed/training/dpsgd.py",
        "norm = gradients.max_grad_norm = optimizer.max_grad_norm = min(",
        "norm = gradients.max_grad_norm = min(",
        ("tests/training/test_dpsgd_variants.py",),
    ),
    Mutation(
        "the noise on the sum does not make room for that on the count",
        "privfed/training/mechanism.py",
        "        return self.adaptive_clipping.sum_noise_multiplier(self.noise_multiplier)\n",
        "        return self.noise_multiplier\n",
        ("tests/training/test_dpsgd_variants.py",),
    ),
    Mutation(
        "the count of clipped records is not centred",
        "privfed/training/dpsgd.py",
        "    count = int(within.count_nonzero()) - len(within) / 2\n",
        "    count = int(within.count_nonzero())\n",
        ("tests/training/test_dpsgd_variants.py",),
    ),
    Mutation(
        "a batch may exceed its capacity",
        "privfed/training/dpsgd.py",
        "indices if capacity is None or len(indices) <= capacity else randomness.subset(indices, capacity)",
        "indices",
        ("tests/training/test_dpsgd_variants.py",),
    ),
    Mutation(
        "a customer may have more records than declared",
        "privfed/training/dpsgd.py",
        ".max() > most:",
        ".max() > 2 * most:",
        ("tests/training/test_dpsgd_variants.py",),
    ),
    Mutation(
        "customers are charged as records",
        "privfed/training/mechanism.py",
        "records_per_customer=self.records_per_customer, steps=steps\n",
        "records_per_customer=1, steps=steps\n",
        ("tests/training/test_dpsgd_variants.py",),
    ),
    Mutation(
        "a correction is dropped",
        "privfed/training/dpsgd.py",
        "            add_correction([weights], start, correction)\n",
        "            pass\n",
        ("tests/training/test_dpsgd.py",),
    ),
    Mutation(
        "training begins before its charge",
        "privfed/client.py",
        "        if client.ledger is not None:\n            retry = len",
        "        if client.ledger is None:\n            retry = len",
        ("tests/test_client.py",),
    ),
    Mutation(
        "delta is rounded up where the accountant is inexact",
        "privfed/dp/charges.py",
        "usable_delta = delta - count * _DOUBLE_PRECISION",
        "usable_delta = delta + count * _DOUBLE_PRECISION",
        ("tests/dp/test_accounting.py",),
    ),
    Mutation(
        "a record that is replaced is accounted as one that is removed",
        "privfed/dp/_loss.py",
        "    Relation.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,\n",
        "    Relation.REPLACE_ONE: NeighboringRelation.ADD_OR_REMOVE_ONE,\n",
        ("tests/dp/test_accounting_events.py",),
    ),
    Mutation(
        "noise is calibrated to more than the budget",
        "privfed/dp/accounting.py",
        "_CALIBRATION_AIM: Final = 0.003",
        "_CALIBRATION_AIM: Final = -0.005",
        ("tests/dp/test_accounting.py",),
    ),
    Mutation(
        "nothing is reserved before training",
        "privfed/dp/ledger.py",
        "        self._accounts.check(event, silo_event=silo_event, fingerprint=fingerprint)\n",
        "",
        ("tests/dp/test_ledger.py",),
    ),
    Mutation(
        "the ledger does not see what it charged",
        "privfed/dp/ledger.py",
        "        self._accounts.charge(reservation.event, silo_event=reservation.silo_event, fingerprint=reservation.fingerprint)\n",
        "",
        ("tests/dp/test_ledger.py",),
    ),
    Mutation(
        "an upload is committed before it is stored",
        "privfed/session.py",
        "self._outbox.put(name, self._new_upload(context, place))",
        "self._outbox.put(name, (self._new_upload(context, place), self._trainer.commit(**place))[0])",
        ("tests/test_session.py",),
    ),
    Mutation(
        "the silo's own cost is not charged",
        "privfed/client.py",
        "silo_event=None if self._silo is None else self._silo.event(),",
        "silo_event=None,",
        ("tests/engines/test_silo_rounds.py",),
    ),
    Mutation(
        "silo noise of half the variance",
        "privfed/dp/silo.py",
        "discrete_gaussian(self.share_variance, self.coordinates)",
        "discrete_gaussian(self.share_variance // 2, self.coordinates)",
        ("tests/engines/test_silo_rounds.py",),
    ),
    Mutation(
        "a sum with too little noise is opened",
        "privfed/agreement.py",
        "            self.silo.check_arrivals(participants)",
        "            pass",
        ("tests/engines/test_silo_rounds.py",),
    ),
    Mutation(
        "a ledger that was set back is countersigned",
        "privfed/dp/countersign.py",
        "    if statement.rows < rows or statement.head_of(rows) != head:",
        "    if statement.head_of(rows) != head and statement.rows > rows:",
        ("tests/dp/test_countersign.py",),
    ),
    Mutation(
        "the update is encrypted without being clipped to the bound",
        "privfed/he/codec.py",
        "scaled = np.clip(piece, -params.bound, params.bound)\n",
        "scaled = piece.copy()\n",
        ("tests/he/test_codec.py",),
    ),
    Mutation(
        "an aggregate is decrypted before its tags are checked",
        "privfed/keyholder.py",
        "        if tuple(hash_abridged(upload) for upload in message.uploads) != digest.upload_hashes:",
        "        if False:",
        ("tests/test_keyholder.py",),
    ),
    Mutation(
        "an opening needs no approvals",
        "privfed/keyholder.py",
        "        if message.approved_by != digest.participants:",
        "        if False:",
        ("tests/test_keyholder.py",),
    ),
    Mutation(
        "a frozen weight may move in training",
        "privfed/training/dpsgd.py",
        "    check_unchanged(before, model=model, loss=loss, without=trained)\n",
        "",
        ("tests/training/test_memory.py",),
    ),
    Mutation(
        "a model may remember a batch",
        "privfed/training/memory.py",
        '    if changed is not None:\n        raise UnsupportedModelError(\n            f"{changed} changes',
        '    if False:\n        raise UnsupportedModelError(\n            f"{changed} changes',
        ("tests/training/test_memory.py",),
    ),
    Mutation(
        "what a model does with records may change unseen",
        "privfed/training/memory.py",
        "    if not torch.equal(first.view(torch.int32), again.view(torch.int32)):",
        "    if False:",
        ("tests/training/test_memory.py",),
    ),
    Mutation(
        "squares of float32 may underflow (compiled)",
        "privfed/training/compiled.py",
        "        if not float(longest) <= self._longest:",
        "        if not float(norms.max()) <= 3.4e38:",
        ("tests/training/test_compiled.py",),
    ),
    Mutation(
        "a quantile has the noise of a record where it is about customers",
        "privfed/dp/queries.py",
        "standard_normal(releases) * (noise_multiplier * self._contribution * max",
        "standard_normal(releases) * (noise_multiplier * max",
        ("tests/dp/test_queries.py",),
    ),
    Mutation(
        "means have the noise of a record where they are about customers",
        "privfed/dp/queries.py",
        "standard_normal(exact.size) * (noise_multiplier * self._contribution * math",
        "standard_normal(exact.size) * (noise_multiplier * math",
        ("tests/dp/test_queries.py",),
    ),
    Mutation(
        "counts have the noise of a record where they are about customers",
        "privfed/dp/queries.py",
        "        noise = noise_multiplier * self._contribution\n",
        "        noise = noise_multiplier\n",
        ("tests/dp/test_queries.py",),
    ),
    Mutation(
        "noise is calibrated for one round of many",
        "privfed/training/mechanism.py",
        "steps=rounds * steps)",
        "steps=steps)",
        ("tests/training/test_mechanism.py",),
    ),
    Mutation(
        "a budget may be exceeded by a hundredth",
        "privfed/dp/_account.py",
        "        if after > self._terms.budget.epsilon:",
        "        if after > 1.01 * self._terms.budget.epsilon:",
        ("tests/dp/test_ledger.py",),
    ),
    Mutation(
        "a silo's budget may be exceeded by a hundredth",
        "privfed/dp/_account.py",
        "        if after > budget.epsilon:",
        "        if after > 1.01 * budget.epsilon:",
        ("tests/dp/test_ledger_accounts.py",),
    ),
    Mutation(
        "the head of a ledger is not synchronised",
        "privfed/dp/_chain.py",
        "        os.fsync(self._head.fileno())\n",
        "",
        ("tests/dp/test_ledger.py",),
    ),
    Mutation(
        "the folder of a new ledger is not synchronised",
        "privfed/dp/_chain.py",
        "                os.fsync(descriptor)  #",
        "                pass  #",
        ("tests/dp/test_ledger.py",),
    ),
    Mutation(
        "the last row of a ledger may be missing beside a damaged head",
        "privfed/dp/_chain.py",
        "        if torn and len(rows) <= count:",
        "        if False:",
        ("tests/dp/test_ledger.py",),
    ),
    Mutation(
        "a federation claims what its best client promises",
        "privfed/dp/federation.py",
        "return max(self.statements",
        "return min(self.statements",
        ("tests/dp/test_federation.py",),
    ),
    Mutation(
        "the first page of a report is about the client that spent least",
        "privfed/report/summary.py",
        "most = max(report",
        "most = min(report",
        ("tests/test_report_worst_client.py",),
    ),
    Mutation(
        "a report advises by the client that spent least",
        "privfed/report/advice.py",
        "most = max(report",
        "most = min(report",
        ("tests/test_report_worst_client.py",),
    ),
    Mutation(
        "a verdict is comforted by the client that spent least",
        "privfed/report/summary.py",
        "CALM and max(spent",
        "CALM and min(spent",
        ("tests/test_report_worst_client.py",),
    ),
    Mutation(
        "a figure shows the client that spent least",
        "privfed/report/pictures.py",
        "highest = [max(",
        "highest = [min(",
        ("tests/test_report_worst_client.py",),
    ),
    Mutation(
        "a policy is checked at the largest round",
        "privfed/report/checks.py",
        "fewest = min(sum",
        "fewest = max(sum",
        ("tests/test_report_worst_client.py",),
    ),
    Mutation(
        "a policy is checked at the lightest client",
        "privfed/report/checks.py",
        "    shares = [max(",
        "    shares = [min(",
        ("tests/test_report_worst_client.py",),
    ),
)
