/* Runs the planner: Pyodide, numpy and distca from runtime/, beside this file. Nothing else is requested.

   In:  {question, part, id, file: {name, bytes}}     Out: {ready} once, then {id, part, answer} for each question. */
"use strict";

const here = new URL("runtime/", self.location.href).href;
const SITE = "/lib/python3.12/site-packages";

const fetched = async (name) => {
  const response = await fetch(here + name);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
};

async function start() {
  const archives = ["numpy.zip", "distca.zip"].map(fetched);   // while the runtime starts
  importScripts(here + "pyodide.js");
  const python = await loadPyodide({indexURL: here});
  for (const archive of archives) python.unpackArchive(await archive, "zip", {extractDir: SITE});
  python.runPython("import os, sys; os.makedirs('/files', exist_ok=True); os.chdir('/files'); "
    + "import browser; browser.prepare()");
  const answer = python.pyimport("answer").answer;
  return {python, answer};
}

const started = start();
started.then(() => self.postMessage({ready: true}), (error) => self.postMessage({failed: String(error)}));

self.onmessage = async ({data}) => {
  const {python, answer} = await started;
  if (data.file) {
    python.FS.writeFile(`/files/${data.file.name}`, data.file.bytes);
    return;
  }
  const begin = performance.now();
  let found;
  try {
    found = JSON.parse(answer(data.question, data.part));
  } catch (error) {
    found = {fault: String(error)};
  }
  self.postMessage({id: data.id, part: data.part, answer: found, milliseconds: performance.now() - begin});
};
