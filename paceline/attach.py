"""placeholder"""


def play(*a): ...
