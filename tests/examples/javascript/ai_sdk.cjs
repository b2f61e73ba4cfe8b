// Runs Vercel's package ai against the server at BASE_URL, and prints the results as one JSON object.
const { generateObject, generateText, jsonSchema, Output, stepCountIs, streamObject, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const options = { baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY };
const models = {
  chat: () => createOpenAI(options).chat("model"),
  responses: () => createOpenAI(options)("model"),
  compatible: () =>
    createOpenAICompatible({ name: "jaxpaged", supportsStructuredOutputs: true, includeUsage: true, ...options })("model"),
};
const model = models[process.argv[2]]();
const prompt = "hi";
const schema = z.object({ name: z.enum(["Ada", "Alan"]), age: z.number().int() });
const usual = { model, prompt, maxRetries: 0 };

function weather(calls) {
  return tool({
    description: "Get the current temperature of a city.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
    execute: async (args) => (calls.push(args), `${args.city}: 17 degrees`),
  });
}

const tasks = {
  async text() {
    const { text, reasoningText, finishReason, usage } = await generateText(usual);
    return { text, reasoning: reasoningText, reason: finishReason, tokens: usage.outputTokens };
  },
  async stream() {
    const result = streamText({ ...usual, onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    return {
      text,
      reasoning: await result.reasoningText,
      reason: await result.finishReason,
      tokens: (await result.usage).outputTokens,
    };
  },
  async tools() {
    const calls = [];
    const result = await generateText({ ...usual, tools: { get_weather: weather(calls) }, stopWhen: stepCountIs(3) });
    return { text: result.text, calls, steps: result.steps.length };
  },
  async toolsStream() {
    const calls = [];
    const result = streamText({ ...usual, tools: { get_weather: weather(calls) }, stopWhen: stepCountIs(3) });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    return { text, calls, steps: (await result.steps).length };
  },
  async object() {
    return (await generateObject({ ...usual, schema })).object;
  },
  async objectStream() {
    const result = streamObject({ ...usual, schema });
    for await (const _ of result.partialObjectStream);
    return await result.object;
  },
  async output() {
    return (await generateText({ ...usual, output: Output.object({ schema }) })).output;
  },
};

tasks[process.argv[3]]().then((result) => console.log(JSON.stringify(result)));
