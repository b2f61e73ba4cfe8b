"""The agent of agent_chat.py in /v1/responses, with a stream, as OpenAI's guide to function calling shows it."""

import json

from openai import OpenAI


def get_weather(city):
    return f"{city}: 17 degrees"


def send_email(to, body):
    return f"sent {len(body)} characters to {to}"


def describe(name, description, *arguments):
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}
    return {"type": "function", "name": name, "description": description, "parameters": schema}


functions = {"get_weather": get_weather, "send_email": send_email}
tools = [
    describe("get_weather", "Get the current temperature of a city.", "city"),
    describe("send_email", "Send an email.", "to", "body"),
]
client = OpenAI()
items = [{"role": "user", "content": "Mail the weather in Paris and in Bogot\u00e1 to Ada."}]
while True:
    with client.responses.stream(model="gpt-5", instructions="Be brief.", input=items, tools=tools) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="")
        response = stream.get_final_response()
    items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = functions[call.name](**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
print()
