"""Tools, and answers that call them as models of each format write them."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
MULTIPLY = {"type": "function", "function": {"name": "multiply"}}
TOOLS = [WEATHER, MULTIPLY]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "$defs": {"city": {"enum": ["Rome", "Paris"]}},
    "additionalProperties": False,
}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": CITY, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}


def calls_text(name, *calls):
    """The calls, as name and JSON text of the arguments, in a format."""
    if name == "openai":
        return "".join(f"to=functions.{call}<|message|>{arguments}<|call|>" for call, arguments in calls)
    if name == "deepseek_v3":
        mark = "<｜tool▁{}｜>".format
        begin, separator, end = mark("call▁begin"), mark("sep"), mark("call▁end")
        each = (f"{begin}function{separator}{call}\n```json\n{text}\n```{end}" for call, text in calls)
        return mark("calls▁begin") + "\n".join(each) + mark("calls▁end")
    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [f'{{"name": "{call}", "{key}": {arguments}}}' for call, arguments in calls]
    if name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return "; ".join(objects)


def harmony(*calls, thought):
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    begin = "<|channel|>commentary to=functions."
    each = (f"{begin}{name} <|constrain|>json<|message|>{arguments}" for name, arguments in calls)
    return text + "<|end|><|start|>assistant".join(each)


def written(form, *calls, thought=""):
    """An answer with these calls, as a model of this format writes it."""
    if form == "openai":
        return harmony(*calls, thought=thought)
    return (f"<think>{thought}</think>\n\n" if thought else "") + calls_text(form, *calls)
