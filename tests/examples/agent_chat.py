"""An agent with two tools in /v1/chat/completions, as OpenAI's guide to function calling shows it. It knows nothing of
this server: the environment variables of the openai client say where it is."""

import json

from openai import OpenAI


def get_weather(city):
    return f"{city}: 17 degrees"


def send_email(to, body):
    return f"sent {len(body)} characters to {to}"


def describe(name, description, *arguments):
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


functions = {"get_weather": get_weather, "send_email": send_email}
tools = [
    describe("get_weather", "Get the current temperature of a city.", "city"),
    describe("send_email", "Send an email.", "to", "body"),
]
client = OpenAI()
messages = [{"role": "user", "content": "Mail the weather in Paris and in Bogot\u00e1 to Ada."}]
while True:
    completion = client.chat.completions.create(model="gpt-5", messages=messages, tools=tools)
    message = completion.choices[0].message
    messages.append(message)
    if completion.choices[0].finish_reason != "tool_calls":
        break
    for call in message.tool_calls:
        result = functions[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
