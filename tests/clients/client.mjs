// What a program in JavaScript does with OpenAI's own library; prints what it got as one JSON object.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is a block table?" }];
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);
const model = found.models[0];

const chat = await client.chat.completions.create({ model, messages, temperature: 0, max_completion_tokens: 24 });
found.chat = { text: chat.choices[0].message.content, finish: chat.choices[0].finish_reason, usage: chat.usage };

found.stream = { text: "", roles: [], finishes: [], usage: null };
const stream = await client.chat.completions.create({
  model, messages, temperature: 0, max_completion_tokens: 24, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  if (chunk.usage) found.stream.usage = chunk.usage;
  for (const choice of chunk.choices) {
    found.stream.text += choice.delta.content ?? "";
    if (choice.delta.role) found.stream.roles.push(choice.delta.role);
    if (choice.finish_reason) found.stream.finishes.push(choice.finish_reason);
  }
}

const runner = client.chat.completions.stream({ model, messages, temperature: 0, max_completion_tokens: 24 });
found.helper = (await runner.finalChatCompletion()).choices[0].message.content;

const completion = await client.completions.create({ model, prompt: ["The memory", "A block"], temperature: 0, max_tokens: 8, n: 2 });
found.completions = completion.choices.map((choice) => [choice.index, choice.text]);

const response = await client.responses.create({ model, input: "What is a block table?", temperature: 0, max_output_tokens: 24 });
found.response = { text: response.output_text, status: response.status };
found.events = [];
found.responseStream = "";
for await (const event of await client.responses.create({
  model, input: "What is a block table?", temperature: 0, max_output_tokens: 24, stream: true,
})) {
  found.events.push(event.type);
  if (event.type === "response.output_text.delta") found.responseStream += event.delta;
}

const Part = z.object({ kind: z.enum(["block", "table"]), count: z.number().int().min(0).max(99) });
const wanted = { model, messages, temperature: 0, response_format: zodResponseFormat(Part, "part") };
found.parsed = (await client.chat.completions.parse(wanted)).choices[0].message.parsed;
found.parsedStream = (await client.chat.completions.stream(wanted).finalChatCompletion()).choices[0].message.parsed;
const asked = { model, input: "What is a block table?", temperature: 0, text: { format: zodTextFormat(Part, "part") } };
found.parsedResponse = (await client.responses.parse(asked)).output_parsed;

found.errors = [];
for (const wrong of [{ temperature: -1 }, { max_completion_tokens: 1_000_000 }, { model: "nobody" }]) {
  try {
    await client.chat.completions.create({ model, messages, ...wrong });
  } catch (error) {
    found.errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}
console.log(JSON.stringify(found));
