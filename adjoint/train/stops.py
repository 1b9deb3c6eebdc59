"""The errors that stop a run which has begun; those of the user's making are `ArgumentError` and `Unsupported`."""


class CannotSave(RuntimeError):
    """A file of a run could not be written; what was there before still is."""


class NotFinite(RuntimeError):
    """A loss or a gradient is infinite or undefined; the sentence says where it was first seen."""


class RankLost(RuntimeError):
    """Another process of the run has ended, or cannot be reached."""


class Interrupted(RuntimeError):
    """The user pressed Ctrl-C; the sentence says from where the run can go on."""


STOPS = (CannotSave, NotFinite, RankLost)
