// What chat programs built on the AI SDK do, by both of its ways to a local model; prints one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const address = process.argv[2];
const models = {
  openai: createOpenAICompatible({ name: "quire", baseURL: `${address}/v1`, supportsStructuredOutputs: true })("guide"),
  ollama: createOllama({ baseURL: `${address}/api` })("guide"),
};
const prompt = "What is a block table?";
const limits = { temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const found = {};

for (const [name, model] of Object.entries(models)) {
  const answer = await generateText({ model, prompt, ...limits });
  let streamed = "";
  const stream = streamText({ model, prompt, ...limits });
  for await (const piece of stream.textStream) streamed += piece;
  const schema = z.object({ count: z.number().int().min(0).max(99) });
  const held = await generateText({ model, prompt: "How many?", temperature: 0, maxRetries: 0, output: Output.object({ schema }) });
  found[name] = { text: answer.text, streamed, finish: answer.finishReason, usage: answer.usage, held: held.output };
}
console.log(JSON.stringify(found));
