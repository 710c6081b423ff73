"""The one error of this floor: something that the caller can fix, said in a line or two."""


class KernelError(ValueError):
    """An argument is wrong, or a device or model cannot do what was asked; the message says what was found."""
