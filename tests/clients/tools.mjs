// Calls of functions, as OpenAI's library for JavaScript reads them; prints what it got as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "guide";
const messages = [{ role: "user", content: "How warm is it?" }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Paris", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 7 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const declared = { name: "temperature", description: "How warm it is in a city.", parameters, strict: true };
const tools = [{ type: "function", function: declared }];
const wanted = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0, max_tokens: 200 };
const found = {};

const shown = (call) => ({ name: call.function.name, arguments: call.function.arguments });
const choice = (await client.chat.completions.create(wanted)).choices[0];
found.finish = choice.finish_reason;
found.whole = shown(choice.message.tool_calls[0]);

found.streamed = { name: "", arguments: "" };
for await (const chunk of await client.chat.completions.create({ ...wanted, stream: true })) {
  for (const part of chunk.choices[0]?.delta.tool_calls ?? []) {
    found.streamed.name += part.function.name ?? "";
    found.streamed.arguments += part.function.arguments ?? "";
  }
}
const completion = await client.chat.completions.stream(wanted).finalChatCompletion();
found.helper = shown(completion.choices[0].message.tool_calls[0]);

const asked = { model, input: "How warm is it?", tools: [{ type: "function", ...declared }], tool_choice: "required", parallel_tool_calls: false, temperature: 0 };
found.response = (await client.responses.create(asked)).output[0].arguments;
found.events = "";
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  if (event.type === "response.function_call_arguments.delta") found.events += event.delta;
}

// The library calls the function itself, and sends what it returned.
found.ran = [];
const run = (given) => { found.ran.push(given); return "19 degrees"; };
const named = { type: "function", function: { ...declared, function: run, parse: JSON.parse } };
const runner = client.chat.completions.runTools({ ...wanted, tools: [named], tool_choice: { type: "function", function: { name: "temperature" } } });
await runner.done();
const call = { role: "assistant", content: null, tool_calls: choice.message.tool_calls };
const result = { role: "tool", tool_call_id: choice.message.tool_calls[0].id, content: "19 degrees" };
const last = await client.chat.completions.create({ ...wanted, messages: [...messages, call, result], tool_choice: "none" });
found.last = last.choices[0].message.content;
console.log(JSON.stringify(found));
