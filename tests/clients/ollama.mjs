// What a program in JavaScript does with Ollama's own library; prints what it got as one JSON object.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const messages = [{ role: "user", content: "What is a block table?" }];
const options = { temperature: 0, num_predict: 24 };
const model = "guide";
const found = {};

found.chat = (await client.chat({ model, messages, options })).message.content;
found.stream = "";
found.reasons = [];
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  found.stream += part.message.content;
  if (part.done) found.reasons.push(part.done_reason);
}
found.generate = (await client.generate({ model, prompt: messages[0].content, options })).response;
found.held = (await client.chat({ model, messages, format: { enum: ["yes", "no"] } })).message.content;

const endless = await client.generate({ model, prompt: "A block", raw: true, options: { temperature: 0 }, stream: true });
try {
  for await (const part of endless) if (part.response) endless.abort();
} catch (error) {
  found.aborted = error.name;
}

found.models = (await client.list()).models.map((each) => each.name);
found.running = (await client.ps()).models.map((each) => each.name);
found.capabilities = (await client.show({ model })).capabilities;
found.version = (await client.version()).version;

found.errors = [];
for (const stream of [false, true]) {
  try {
    await client.chat({ model: "nobody", messages, stream });
  } catch (error) {
    found.errors.push([error.message, error.status_code]);
  }
}
console.log(JSON.stringify(found));
