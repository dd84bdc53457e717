// An agent in TypeScript with the openai package: reads an episode from stdin, writes its reward to stdout.
import OpenAI from "openai";
import { readFileSync } from "node:fs";

type Task = { prompt: string; answer: string; store: Record<string, number> };
type Episode = { baseURL: string; apiKey: string; maxTurns: number; task: Task };

const episode: Episode = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: episode.baseURL, apiKey: episode.apiKey });

const tool = (name: string, description: string, argument: string): OpenAI.ChatCompletionTool => ({
  type: "function",
  function: {
    name,
    description,
    parameters: { type: "object", properties: { [argument]: { type: "string" } }, required: [argument] },
  },
});
const tools = [
  tool("lookup", "Look up a key in the store.", "key"),
  tool("calculate", "Work out an arithmetic expression.", "expression"),
];

function use(name: string, args: string): string {
  try {
    const values = JSON.parse(args);
    if (name === "lookup" && values.key in episode.task.store) return String(episode.task.store[values.key]);
    const [, a, sign, b] = /^(-?\d+) ([-+*]) (-?\d+)$/.exec(values.expression) ?? [];
    if (name !== "calculate" || sign === undefined) return `error: cannot do ${name} ${args}`;
    const [x, y] = [Number(a), Number(b)];
    return String(sign === "+" ? x + y : sign === "-" ? x - y : x * y);
  } catch (error) {
    return `error: ${error}`;
  }
}

async function play({ task, maxTurns }: Episode): Promise<number> {
  const messages: OpenAI.ChatCompletionMessageParam[] = [{ role: "user", content: task.prompt }];
  for (let turn = 0; turn < maxTurns; turn++) {
    const completion = await client.chat.completions.create({ model: "policy", messages, tools });
    const message = completion.choices[0].message;
    if (!message.tool_calls?.length) return Number((message.content ?? "").trim() === task.answer);
    messages.push(message);
    for (const call of message.tool_calls) {
      if (call.type !== "function") continue;
      messages.push({ role: "tool", tool_call_id: call.id, content: use(call.function.name, call.function.arguments) });
    }
  }
  return 0;
}

play(episode)
  .then((success) => console.log(JSON.stringify({ success })))
  .catch((error) => {
    // A limit of the episode is no fault of this program: the policy did not reach its goal.
    const limit = ["max_turns_exceeded", "context_length_exceeded"].includes(error?.code);
    if (!limit) throw error;
    console.log(JSON.stringify({ success: 0 }));
  });
