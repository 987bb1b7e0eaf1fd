"""Bytes of the protocol in Flower's records, and back."""

from flwr.app import Array, ArrayRecord, RecordDict

from privfed.errors import InvalidMessageError

_NAME = "privfed"
_STYPE = "privfed.message"
_DTYPE = "uint8"


def seal(message: bytes) -> RecordDict:
    """A message as one array of its own kind: arrays are what Flower sends in pieces, of at most 5 MB.

    Example:
        >>> unseal(seal(b"signed bytes"))
        b'signed bytes'
    """
    return RecordDict({_NAME: ArrayRecord({_NAME: Array(dtype=_DTYPE, shape=(len(message),), stype=_STYPE, data=message)})})


def unseal(content: RecordDict) -> bytes:
    """The message in a record.

    Raises:
        InvalidMessageError: If the record is none that `seal` makes.
    """
    arrays = content.get(_NAME)
    if len(content) != 1 or not isinstance(arrays, ArrayRecord) or list(arrays) != [_NAME]:
        raise InvalidMessageError
    array = arrays[_NAME]
    if array.stype != _STYPE or array.dtype != _DTYPE or tuple(array.shape) != (len(array.data),):
        raise InvalidMessageError
    return array.data
