// Loads a GGUF file with llama.cpp and continues a prompt greedily. Prints the ids of the prompt and of what follows.
//
//   npm install node-llama-cpp
//   GPTMILL_LLAMA_CPP=that/folder pytest -m llamacpp
//
// Usage: node llama_cpp.mjs FOLDER_WITH_NODE_MODULES MODEL.gguf PROMPT COUNT
import {createRequire} from "module";
import path from "path";
import {pathToFileURL} from "url";

const [folder, modelPath, prompt, count] = process.argv.slice(2);
const require = createRequire(path.resolve(folder, "package.json"));
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(require.resolve("node-llama-cpp")));

const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const context = await model.createContext({contextSize: model.trainContextSize, threads: 1});
const sequence = context.getSequence();
const promptIds = [...model.tokenize(prompt)];
const input = model.tokens.shouldPrependBosToken ? [model.tokens.bos, ...promptIds] : promptIds;
const ids = [];
for await (const id of sequence.evaluate(input, {temperature: 0, yieldEogToken: true})) {
    ids.push(id);
    if (ids.length >= Number(count)) break;
}
console.log(JSON.stringify({input, ids, text: model.detokenize(ids)}));
process.exit(0);
