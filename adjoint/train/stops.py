"""The errors that stop a run after its beginning. Mistakes of the user are `ArgumentError` and `Unsupported`."""


class CannotSave(RuntimeError):
    """A file of a run could not be written; earlier files are unchanged."""


class NotFinite(RuntimeError):
    """A loss or a gradient is infinite or NaN; the sentence says where this was first seen."""


class RankLost(RuntimeError):
    """Another process of the run has ended, or cannot be reached."""


class Interrupted(RuntimeError):
    """The user pressed Ctrl-C; the sentence says how to resume the run."""


STOPS = (CannotSave, NotFinite, RankLost)
