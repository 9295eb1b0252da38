"""Types of numbers with bounds, for the fields of arguments. lib/command_line.py reads them, and others like them.

lr: PositiveFloat = 1e-5
temperature: Annotated[float, Ge(0.01)] = 0.7
"""

from typing import Annotated

from annotated_types import Ge, Gt, Le

PositiveInt = Annotated[int, Gt(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
ZeroToOne = Annotated[float, Ge(0), Le(1)]
