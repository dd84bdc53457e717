"""The agent: a loop over tool calls, with the openai client as for any other server. Its result is the reward."""

import json

PRICES = {"ant": 17, "bee": 42, "cat": 65, "dog": 23, "eel": 91, "fox": 38, "owl": 54, "seal": 76, "toad": 12}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, description, argument in (
        ("lookup", "Look up the price of a thing.", "key"),
        ("calculate", "Work out a sum or a difference.", "expression"),
    )
]


async def agent(task, client, max_turns: int = 6):
    """Plays one episode with `client`, an openai.AsyncOpenAI whose tokens are recorded. Returns the rewards.

    What it raises fails the episode, which is then tried again and never becomes reward 0.
    """
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(max_turns):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return {"success": score(message.content or "", task["ground_truth"])}
        messages.append(message)
        for call in message.tool_calls:
            result = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"success": 0.0}


def score(answer, truth):
    """1 for the answer and nothing else, else 0."""
    return float(answer.strip() == truth)


def use(name, arguments):
    """The result of a call, or an error message, so that the policy can do better in its next turn."""
    try:
        values = json.loads(arguments)
        if name == "lookup":
            return str(PRICES[values["key"]])
        if name == "calculate":
            first, sign, second = values["expression"].split()
            return str(int(first) + int(second) if sign == "+" else int(first) - int(second))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"
    return f"error: no tool {name}"
