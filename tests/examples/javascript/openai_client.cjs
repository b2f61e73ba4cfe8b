// Runs the package openai against the server at BASE_URL, and prints the results as one JSON object.
const OpenAI = require("openai");
const { zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = "model";
const messages = [{ role: "user", content: "hi" }];
const Person = z.object({ name: z.enum(["Ada", "Alan"]), age: z.number().int() });
const weather = {
  name: "get_weather",
  description: "Get the current temperature of a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

async function runTools(options) {
  const calls = [];
  const run = (args) => (calls.push(args), `${args.city}: 17 degrees`);
  const tool = { type: "function", function: { ...weather, parse: JSON.parse, function: run } };
  const runner = client.chat.completions.runTools({ model, messages, tools: [tool], ...options });
  return { text: await runner.finalContent(), calls };
}

const tasks = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages });
    return { text: answer.choices[0].message.content, reason: answer.choices[0].finish_reason, usage: answer.usage };
  },
  async chatStream() {
    const stream = client.chat.completions.stream({ model, messages, stream_options: { include_usage: true } });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const answer = await stream.finalChatCompletion();
    return { text, final: answer.choices[0].message.content, reason: answer.choices[0].finish_reason };
  },
  tools: () => runTools({}),
  toolsStream: () => runTools({ stream: true }),
  async parse() {
    const response_format = zodResponseFormat(Person, "person");
    const answer = await client.chat.completions.parse({ model, messages, response_format });
    return answer.choices[0].message.parsed;
  },
  async responses() {
    const answer = await client.responses.create({ model, input: "hi" });
    return { text: answer.output_text, status: answer.status };
  },
  async responsesStream() {
    const stream = client.responses.stream({ model, input: "hi" });
    let text = "";
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    const answer = await stream.finalResponse();
    return { text, final: answer.output_text, status: answer.status };
  },
  async responsesParse() {
    const answer = await client.responses.parse({ model, input: "hi", text: { format: zodTextFormat(Person, "person") } });
    return answer.output_parsed;
  },
  async responsesTools() {
    const tools = [{ type: "function", strict: false, ...weather }];
    const first = await client.responses.create({ model, input: "hi", tools });
    const calls = first.output.filter((item) => item.type === "function_call");
    const input = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "17 degrees" }));
    const last = await client.responses.create({ model, input, tools, previous_response_id: first.id });
    return { text: last.output_text, calls: calls.map((call) => JSON.parse(call.arguments)) };
  },
  async error() {
    try {
      await client.chat.completions.create({ model, messages, temperature: 3 });
    } catch (error) {
      return { isBadRequest: error instanceof OpenAI.BadRequestError, param: error.param };
    }
  },
};

tasks[process.argv[2]]().then((result) => console.log(JSON.stringify(result)));
