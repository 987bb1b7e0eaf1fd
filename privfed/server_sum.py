"""What the server makes of the uploads that it stored: the digest, masked products, the sum on ciphertexts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from privfed.digest import RoundDigest, hash_message
from privfed.errors import CohortError, OpeningRefusedError, RoundSkippedError
from privfed.he.additive import CkksVector, SeededSum, sum_chunks, sum_first_polynomials
from privfed.he.params import SEED_BYTES
from privfed.he.product import masked_products
from privfed.he.product_params import ProductParams
from privfed.he.threshold import OnePolynomialVector, sum_polynomials
from privfed.identity import Identity
from privfed.message import Kind
from privfed.server_setup import require_enough
from privfed.server_spool import COMMITMENTS, Phase, RoundSpool
from privfed.trust import EscrowTrust, ThresholdTrust
from privfed.wire import check_upload, upload_statement
from privfed.wire_aggregate import EncryptedSum, encode_aggregate
from privfed.wire_commit import decode_commitments
from privfed.wire_digest import decode_approval, encode_digest
from privfed.wire_escrow import decode_opened, encode_request
from privfed.wire_products import decode_coefficients, encode_products, sketch_seed


def announcement(spool: RoundSpool, identity: Identity) -> bytes:
    """The digest message over the uploads that came.

    Raises:
        CohortError: If the policy does not allow an opening of them; nothing was summed.
        DamagedFileError: If what was stored is not what came.
    """
    context, participants = spool.context, spool.received(Kind.UPLOAD)
    require_enough(context, participants, "uploads")
    try:
        coefficients = context.agreement.coefficients(participants)
    except OpeningRefusedError as error:
        raise CohortError(f"the uploads that came may not be opened: {error}; nothing was summed") from error
    hashes, statements = list[bytes](), dict[str, bytes]()
    with spool.reading():
        for name in participants:
            upload = spool.message(Kind.UPLOAD, name)
            check_upload(upload, context, sender=name)
            hashes.append(hash_message(upload))
            statements[name] = upload_statement(upload, context)
    digest = RoundDigest(
        participants=participants,
        coefficients=tuple(coefficients.values()),
        upload_hashes=tuple(hashes),
        rule=context.agreement.rule.name,
        key_id=spool.key_id,
    )
    return encode_digest(context, identity, digest, statements)


def decided(spool: RoundSpool) -> RoundDigest:
    """The digest with the coefficients of the sum: what the agreement makes of it or, in a scored session, what its openers found.

    Raises:
        CohortError: If no digest was announced, or its openers found nothing yet, or not the same.
        RoundSkippedError: If they found no weights that the policy allows.
        DamagedFileError: If what was stored is not what came.
    """
    context, digest = spool.context, spool.digest()
    if not context.agreement.scored:
        return digest
    if isinstance(context.agreement.trust, EscrowTrust):
        with spool.reading():
            coefficients = decode_opened(spool.opened(), context, digest.key_id)[1].coefficients
        if not any(coefficients):
            raise RoundSkippedError(f"round {context.round} is skipped: the key holder found no weights that the policy allows")
        return replace(digest, coefficients=coefficients)
    names = spool.received(Kind.COEFFICIENTS)
    require_enough(context, names, "openers that sent coefficients")
    with spool.reading():
        found = {name: decode_coefficients(spool.message(Kind.COEFFICIENTS, name), context, digest) for name in names}
    if any(sender != name for name, (sender, _) in found.items()) or len({numbers for _, numbers in found.values()}) != 1:
        raise CohortError(f"the openers {list(names)} did not find the same coefficients; nothing was summed; go on with a new round")
    coefficients = next(numbers for _, numbers in found.values())
    if not any(coefficients):
        raise RoundSkippedError(f"round {context.round} is skipped: its openers found no weights that the policy allows")
    return replace(digest, coefficients=coefficients)


def products_message(spool: RoundSpool, identity: Identity, digest: RoundDigest, *, params: ProductParams) -> bytes:
    """The products of every pair of uploads of a digest that all its participants approved, masked and rerandomised.

    Raises:
        DamagedFileError: If what was stored is not what came.
    """
    with spool.reading():
        for name in digest.participants:
            spool.announced(digest, name)
        approvals = [spool.message(Kind.APPROVAL, name) for name in digest.participants]
        products = masked_products(
            lambda upload, chunk: spool.chunk(digest.participants[upload], chunk),
            count=len(digest.participants),
            layout=spool.context.agreement.sent_layout,
            params=params,
            key_id=digest.key_id,
            public_key=spool.public_key(),
            seed=sketch_seed(spool.context, digest, approvals),
        )
    return encode_products(spool.context, identity, spool.files.get(Phase.UPLOAD.value), approvals, products=products)


def request_message(spool: RoundSpool, identity: Identity, digest: RoundDigest, *, approved: Sequence[str]) -> bytes:
    """What asks the key holder to sum and open the uploads of a digest.

    Args:
        spool: The round's.
        identity: The roster's server.
        digest: As announced.
        approved: Names of the participants whose approvals go with it.

    Raises:
        DamagedFileError: If what was stored is not what came.
    """
    context = spool.context
    _, approvals = _checked(spool, digest, approved)
    with spool.reading():
        announced, commitments = spool.files.get(Phase.UPLOAD.value), spool.files.get(COMMITMENTS)
        decode_commitments(commitments, context, digest.key_id)
    return encode_request(context, identity, announced, approvals, commitments=commitments, key_id=digest.key_id)


def aggregate_message(spool: RoundSpool, identity: Identity, digest: RoundDigest, *, approved: Sequence[str]) -> bytes:
    """The encrypted sum of the uploads of a digest, for the openers.

    Args:
        spool: The round's.
        identity: The roster's server.
        digest: As announced.
        approved: Names of the participants whose approvals go with it.

    Raises:
        CohortError, RoundSkippedError: As `decided`; nothing was summed.
        DamagedFileError: If what was stored is not what came; nothing was summed.
    """
    agreement, final = spool.context.agreement, decided(spool)
    uploads, approvals = _checked(spool, digest, approved)
    with spool.reading():
        announced = spool.files.get(Phase.UPLOAD.value)
        total = encrypted_sum(spool, final)
    return encode_aggregate(
        spool.context,
        identity,
        announced,
        approvals,
        uploads=uploads if agreement.upload_tags_bytes else (),
        total=total,
        coefficients=final.coefficients if agreement.scored else (),
    )


def _checked(spool: RoundSpool, digest: RoundDigest, approved: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
    """The abridged uploads and the approvals of a digest, verified again."""
    with spool.reading():
        uploads = [spool.announced(digest, name) for name in digest.participants]
        approvals = [spool.message(Kind.APPROVAL, name) for name in approved]
        for approval in approvals:
            decode_approval(approval, spool.context, digest)
    return uploads, approvals


def encrypted_sum(spool: RoundSpool, digest: RoundDigest) -> EncryptedSum:
    """The sum of the uploads of a digest under its coefficients, chunk by chunk, in the form of the trust mode."""
    params, layout = spool.context.agreement.params, spool.context.agreement.sent_layout
    sizes = params.first_polynomial_sizes(layout)
    if isinstance(spool.context.agreement.trust, ThresholdTrust):
        columns = (_column(spool, digest, index, {}) for index in range(len(sizes)))
        chunks = tuple(sum_polynomials((chunk for _, chunk in column), params) for column in columns)
        return OnePolynomialVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks)
    seeds = {name: bytearray() for name in digest.participants}
    if params.seeded_sums:
        chunks = tuple(sum_first_polynomials(_column(spool, digest, index, seeds), params, size) for index, size in enumerate(sizes))
        collected = tuple(bytes(seed) for seed in seeds.values())
        return SeededSum(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, seeds=collected)
    chunks = tuple(sum_chunks(_column(spool, digest, index, seeds), params, size) for index, size in enumerate(sizes))
    return CkksVector(layout=layout, params=params, key_id=digest.key_id, chunks=chunks, fresh=False)


def _column(spool: RoundSpool, digest: RoundDigest, index: int, seeds: Mapping[str, bytearray]) -> Iterator[tuple[int, bytes]]:
    """Multiplier and chunk `index` of every upload, read from disk one at a time; appends its seed to those of its client, if asked."""
    counting = {name: coefficient for name, coefficient in digest.by_name.items() if coefficient}
    multipliers = spool.context.agreement.weighting.multipliers(tuple(counting.values()))
    for name, multiplier in zip(counting, multipliers, strict=True):
        chunk = spool.chunk(name, index)
        if name in seeds:
            seeds[name].extend(chunk[-SEED_BYTES:])
        yield multiplier, chunk
