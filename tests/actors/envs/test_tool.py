import asyncio
from typing import Literal

import pytest

from asyncrl.actors.envs.tool import Tool, ToolError


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Tell the weather.

    Of a city.

    Args:
        city: where
        days: how many,
            at most ten

    Returns:
        words
    """
    return f"{city} {days} {unit}"


def test_schema_from_signature_and_docstring():
    function = Tool.from_function(weather).schema["function"]
    assert function["name"] == "weather"
    assert function["description"] == "Tell the weather. Of a city."
    properties = function["parameters"]["properties"]
    assert properties["city"] == {"type": "string", "description": "where"}
    assert properties["days"] == {"type": "integer", "default": 1, "description": "how many, at most ten"}
    assert properties["unit"]["enum"] == ["C", "F"]
    assert function["parameters"]["required"] == ["city"]


def test_calls_convert_and_fill_in():
    assert asyncio.run(Tool.from_function(weather)({"city": "Bern", "days": 3})) == "Bern 3 C"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "argument city: Field required"),
        ({"city": "Bern", "days": "many"}, "argument days"),
        ({"city": "Bern", "town": "x"}, "argument town: Extra inputs"),
        ({"city": "Bern", "unit": "K"}, "argument unit"),
    ],
)
def test_arguments_that_do_not_fit_are_the_policys_error(arguments, message):
    with pytest.raises(ToolError, match=message):
        asyncio.run(Tool.from_function(weather)(arguments))


def test_async_methods_and_structured_results():
    class Shop:
        async def stock(self, items: list[str]) -> dict[str, int]:
            """Count."""
            return {item: len(item) for item in items}

    tool = Tool.from_function(Shop().stock)
    assert tool.schema["function"]["parameters"]["properties"]["items"]["items"] == {"type": "string"}
    assert asyncio.run(tool({"items": ["fox"]})) == '{"fox": 3}'


def test_a_function_that_cannot_be_a_tool_is_refused():
    def untyped(x):
        return x

    def open_ended(*x: int) -> None: ...

    with pytest.raises(TypeError, match="parameter x has no type hint"):
        Tool.from_function(untyped)
    with pytest.raises(TypeError, match="cannot be passed by name"):
        Tool.from_function(open_ended)
