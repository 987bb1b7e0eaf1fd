"""Errors that privfed raises on purpose.

A wrong argument is a plain `ValueError` or `TypeError`. The classes here are decisions of the protocol: each message says
what was refused, and that nothing happened. No message ever holds a value, a norm or a range of private data.
"""

from typing import final


class PrivFedError(Exception):
    """Anything that privfed refuses as a matter of protocol."""


@final
class InvalidMessageError(PrivFedError):
    """Bytes from outside were not an authentic, well-formed message.

    One class and one text for every cause, so that a sender of hostile bytes learns nothing from the answer.
    """

    def __init__(self) -> None:
        super().__init__("the message is not valid; it was dropped and nothing happened")


@final
class RoundMismatchError(PrivFedError):
    """An authentic message belongs to another session, round, attempt or key."""


@final
class HistoryMismatchError(PrivFedError):
    """Two parties have opened different rounds before this one, so their models differ."""


@final
class LayoutMismatchError(PrivFedError):
    """Two parties disagree about the names, order or shapes of the model's tensors."""


@final
class ParametersMismatchError(PrivFedError):
    """Two parties disagree about the encryption parameters or the versions behind them.

    Args:
        message: What was refused.
        names: Those that are in the minority, where it is known who is.
    """

    def __init__(self, message: str, *, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


@final
class RoundKeyUsedError(PrivFedError):
    """The key of a round has already encrypted; nothing was encrypted again."""


@final
class MaskUsedError(PrivFedError):
    """A mask has hidden a product already; nothing was masked with it again."""


@final
class AgreementMismatchError(PrivFedError):
    """Two parties disagree about the roster, the weights, the rule or the policy of the session."""


@final
class KeyRefusedError(PrivFedError):
    """A shared key was not handed on, not taken over or not used: it belongs to others, to another roster, session or epoch."""


@final
class ShareRefusedError(PrivFedError):
    """A share of a client's secret is missing or cannot be used; it is said whose. Nothing was sent that depends on it."""


@final
class KeyErasedError(PrivFedError):
    """The key of a round was erased after a later aggregate was stored; nobody who kept to this can open the round again."""


@final
class DamagedFileError(PrivFedError):
    """A file that a party keeps for itself is missing, damaged, or belongs to something else."""


@final
class FolderInUseError(PrivFedError):
    """Another process, or another object in this one, works in the folder."""


@final
class ModelMismatchError(PrivFedError):
    """Two parties hold different models: which cannot happen while opened sums are exact, or a received model is not the agreed one."""


class CohortError(PrivFedError):
    """The participants of a round are not those that its policy demands."""


@final
class RoundSkippedError(CohortError):
    """A rule found no weights under which the policy allows an opening; no aggregate was opened, and the model is as it was."""


class OpeningRefusedError(PrivFedError):
    """An aggregate was not opened; nothing was decrypted."""


@final
class AlreadyOpenedError(OpeningRefusedError):
    """The round was already opened, or promised to another digest."""


@final
class TamperedAggregateError(OpeningRefusedError):
    """An aggregate is not the announced combination of the signed uploads; nothing was decrypted.

    One class and one text for every way to tamper with it. Tell the server no more than `wire.encode_abort` does.
    """

    def __init__(self) -> None:
        super().__init__("the aggregate is not the announced combination of the signed uploads; nothing was decrypted")


@final
class TamperedProductsError(OpeningRefusedError):
    """Products of uploads are not what they should be: other factors, or masks that hide nothing; nothing was opened.

    One class and one text for every way to tamper with them. Tell the server no more than `wire.encode_abort` does.
    """

    def __init__(self) -> None:
        super().__init__("the products are not the masked products of the signed uploads; nothing was opened")


@final
class DecryptionError(PrivFedError):
    """A ciphertext did not decrypt to grid points: wrong key, or corrupted."""


@final
class InsufficientCapacityError(PrivFedError):
    """No encryption parameters hold the sum that was asked for."""


class LedgerError(PrivFedError):
    """The privacy ledger refused."""


@final
class BudgetExceededError(LedgerError):
    """The privacy budget does not cover what was asked; nothing was spent and nothing was trained."""


@final
class LedgerLockedError(LedgerError):
    """Another process holds the ledger."""


@final
class LedgerTamperedError(LedgerError):
    """The ledger's hash chain does not hold: it was edited or truncated."""


@final
class UnsupportedModelError(PrivFedError):
    """The model has parts that would leak or void the privacy guarantee (BatchNorm, buffers, shared state)."""


@final
class UnsupportedDataError(PrivFedError):
    """A table, a file or a client's share of it cannot be used as it stands."""


@final
class UnsupportedInThisModeError(PrivFedError):
    """A rule or an option does not exist in this trust mode."""


@final
class EngineError(PrivFedError):
    """The engine between the parties ended a run, or does not carry what was to be sent. What is stored stays as it was."""


@final
class DeploymentError(PrivFedError):
    """The folder of a party cannot be written, or is not one that `privfed deploy init` wrote."""
