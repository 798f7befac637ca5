"""Models as users of pydantic write them. judge.py draws replies of their schemas, which the models themselves must read."""
from __future__ import annotations

import datetime
import enum
import ipaddress
import pathlib
import uuid
from typing import Annotated, Any, Literal, Optional, Union

import pydantic
from pydantic import BaseModel, Field
from typing_extensions import Required, TypedDict


class Colour(enum.Enum):
    RED, GREEN = "red", "green"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool = True


class Lizard(BaseModel):
    kind: Literal["reptile", "lizard"]
    colour: Colour


class Owner(BaseModel):
    pet: Annotated[Union[Cat, Dog, Lizard], Field(discriminator="kind")]
    others: list[Annotated[Union[Cat, Dog], Field(discriminator="kind")]] = []


class Times(BaseModel):
    day: datetime.date
    time: datetime.time
    moment: datetime.datetime
    span: datetime.timedelta
    end: Optional[datetime.datetime] = None
    aware: pydantic.AwareDatetime


class Addresses(BaseModel):
    id: uuid.UUID
    four: ipaddress.IPv4Address
    six: ipaddress.IPv6Address
    page: pydantic.HttpUrl
    any: pydantic.AnyUrl
    path: pathlib.Path


class Collections(BaseModel):
    pair: tuple[int, str, bool]
    many: tuple[int, ...]
    by_name: dict[str, int]
    by_colour: dict[Colour, int]
    table: list[list[str]]
    colours: set[Colour]
    some: frozenset[Literal[1, 2, 3]]
    names: set[str]
    numbers: Annotated[set[int], Field(min_length=2, max_length=4)]
    amounts: frozenset[float]
    pairs: set[tuple[int, str]]
    days: set[datetime.date] = Field(min_length=2)


class Constrained(BaseModel):
    step: int = Field(gt=0, lt=100, multiple_of=5)
    share: float = Field(ge=0, le=1)
    word: str = Field(min_length=2, max_length=5, pattern=r"^[a-z]+$")
    few: Annotated[list[int], Field(min_length=1, max_length=3)]
    below: pydantic.NegativeInt
    above: pydantic.PositiveFloat
    trimmed: Annotated[str, pydantic.StringConstraints(strip_whitespace=True, to_lower=True, max_length=10)]


class Node(BaseModel):
    value: int
    left: Optional[Node] = None
    right: Optional[Node] = None


class Parent(BaseModel):
    name: str
    child: Optional[Child] = None


class Child(BaseModel):
    parents: list[Parent]
    by_name: dict[str, Parent] = {}


class Named(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    first: int = Field(alias="the first")
    second: str = Field(alias="y-y", description='a "quoted" one,\nin two lines')


class Open(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    x: int
    y: Any = None


class Partial(TypedDict, total=False):
    a: Required[int]
    b: str


class Mixed(BaseModel):
    partial: Partial
    literal: Literal[1, "a", True, None]
    level: Level
    nothing: None
    union: int | str | None
    any: object = None
    json_value: pydantic.JsonValue


class Comparison(BaseModel):
    field: str
    compare: Literal["<", ">", "=="]
    value: Union[int, float, str, bool, list[str]]


class Filters(BaseModel):
    op: Literal["and", "or"]
    clauses: list[Union[Filters, Comparison]] = Field(max_length=3)


class Cats(pydantic.RootModel[list[Cat]]):
    pass


class Tree(pydantic.RootModel[dict[str, Union[int, "Tree"]]]):
    pass


class Everything(BaseModel):
    owner: Owner
    node: Node
    constrained: Constrained
    filters: Filters


MODELS = [Owner, Times, Addresses, Collections, Constrained, Node, Parent, Child, Named, Open, Mixed, Filters, Cats, Tree, Everything]
