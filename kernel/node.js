// The JavaScript and TypeScript kernel: runs cells in one context and tells what they gave, over frames on descriptor 3.
//
// It is kernel.py's brother and speaks the same protocol. Cells are run by Node's own REPL, which knows top-level await and
// keeps what cells declare; we only decide what is shown. Output goes through descriptors 1 and 2, which somebody else reads.
"use strict";

const fs = require("fs");
const moduleLib = require("module");
const net = require("net");
const path = require("path");
const repl = require("repl");
const util = require("util");
const vm = require("vm");
const { PassThrough } = require("stream");

const FRAME_REQUEST = 1, FRAME_EVENT = 2;
const MAX_PAYLOAD = 16 << 20;
const MAX_EVENT = 8 << 20;
const LANGUAGE = process.argv[2] || "javascript";

// --- the socket ------------------------------------------------------------------------------------------------------

const socket = new net.Socket({ fd: 3, readable: true, writable: true });
let unread = Buffer.alloc(0);
const waiting = []; // requests that came while a cell runs

socket.on("data", (chunk) => {
  unread = unread.length ? Buffer.concat([unread, chunk]) : chunk;
  for (;;) {
    if (unread.length < 8) return;
    const length = unread.readUInt32BE(4);
    if (unread[0] === 0 || unread[0] > 9 || length > MAX_PAYLOAD) leave(76, "bad frame");
    if (unread.length < 8 + length) return;
    const kind = unread[0], payload = unread.subarray(8, 8 + length);
    unread = unread.subarray(8 + length);
    if (kind === FRAME_REQUEST) waiting.push(JSON.parse(payload.toString("utf8")));
    next();
  }
});
socket.on("end", () => leave(0));
socket.on("error", () => leave(74));

function leave(status, why) {
  if (why) process.stderr.write("kernel: " + why + "\n");
  process.reallyExit(status);
}

/** ASCII, like every kernel's events. */
function encode(event) {
  return Buffer.from(JSON.stringify(event).replace(/[\u0080-\uffff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")), "latin1");
}

function send(event) {
  let payload = encode(event);
  if (payload.length > MAX_EVENT) payload = encode(shortened(event, payload.length));
  const header = Buffer.alloc(8);
  header[0] = FRAME_EVENT;
  header.writeUInt32BE(payload.length, 4);
  writeAll(Buffer.concat([header, payload]));
}

/** Written at once, so that an event can neither be overtaken by output nor be lost when the cell ends the process. */
function writeAll(data) {
  for (let at = 0; at < data.length; ) {
    try {
      at += fs.writeSync(3, data, at);
    } catch (e) {
      if (e.code === "EAGAIN") Atomics.wait(pause, 0, 0, 1);
      else leave(74);
    }
  }
}

const pause = new Int32Array(new SharedArrayBuffer(4));

function shortened(event, size) {
  const note = `${size} bytes, over the limit of ${MAX_EVENT} for one event`;
  if (event.type === "result") return { type: "result", result: { data: { "text/plain": `<result left out: ${note}>` }, main: event.result.main } };
  const e = event.error;
  return { type: "error", error: { name: e.name, value: e.value.slice(0, 10000), traceback: e.traceback.slice(0, 100).map((l) => l.slice(0, 2000)) } };
}

// --- values ----------------------------------------------------------------------------------------------------------

let running = null; // the cell that runs: {rich, finish}

function show(data, main) {
  if (running) send({ type: "result", result: main ? { data, main } : { data } });
}

function bundle(value) {
  const data = { "text/plain": textOf(value) };
  if (value !== null && typeof value === "object") {
    for (const [method, mime] of METHODS) {
      let made;
      try {
        made = typeof value[method] === "function" ? value[method]() : undefined;
      } catch { /* a value that resists has no such form */ }
      if (made !== undefined && made !== null) Object.assign(data, mime ? { [mime]: made } : made);
    }
    if (running && running.rich && !("application/json" in data) && isPlain(value)) addJSON(data, value);
  }
  return data;
}

const METHODS = [
  ["_toMime", null], ["_toHtml", "text/html"], ["_toSvg", "image/svg+xml"], ["_toPng", "image/png"], ["_toJpeg", "image/jpeg"],
];

function isPlain(value) {
  if (Array.isArray(value)) return true;
  const proto = Object.getPrototypeOf(value);
  return proto === null || (proto.constructor && proto.constructor.name === "Object" && Object.getPrototypeOf(proto) === null);
}

function addJSON(data, value) {
  try {
    const text = JSON.stringify(value);
    if (text !== undefined && text.length <= 1 << 20) data["application/json"] = JSON.parse(text);
  } catch { /* circular, or a BigInt */ }
}

function textOf(value) {
  try {
    return util.inspect(value, { depth: 4, maxArrayLength: 1000, maxStringLength: 1 << 20, breakLength: 80 });
  } catch {
    return "<unprintable>";
  }
}

/** What a cell may call to show something: display(value) and $$.html(…), as notebooks for JavaScript have it. */
const shown = {
  mime: (data) => show(data),
  text: (v) => show({ "text/plain": String(v) }), html: (v) => show({ "text/html": String(v) }),
  svg: (v) => show({ "image/svg+xml": String(v) }), png: (v) => show({ "image/png": base64(v) }), jpeg: (v) => show({ "image/jpeg": base64(v) }),
  json: (v) => show({ "application/json": v, "text/plain": textOf(v) }), markdown: (v) => show({ "text/markdown": String(v) }),
};

function base64(v) {
  return typeof v === "string" ? v : Buffer.from(v).toString("base64");
}

// --- errors ----------------------------------------------------------------------------------------------------------

const OWN = [__filename, "node:", "(internal/"];

function tellError(error) {
  if (error instanceof repl.Recoverable) error = error.err; // code that ends too early
  const isError = error !== null && typeof error === "object" && typeof error.stack === "string";
  const name = isError ? String(error.name || "Error") : "Error";
  const value = isError ? String(error.message) : textOf(error);
  send({ type: "error", error: { name, value, traceback: isError ? stackOf(error) : [`Uncaught ${value}`] } });
}

/** A stack without our own frames and Node's. */
function stackOf(error) {
  return error.stack.split("\n").filter((line) => !/^\s+at /.test(line) || !OWN.some((own) => line.includes(own)));
}

// --- cells -----------------------------------------------------------------------------------------------------------

const silentInput = new PassThrough();
const server = repl.start({
  input: silentInput, output: new PassThrough().resume(), terminal: false, useGlobal: true, prompt: "", preview: false,
});
server.on("exit", () => {}); // ours to decide
for (const name of ["_", "_error"]) Object.defineProperty(globalThis, name, { value: undefined, writable: true, configurable: true });
for (const name of ["crypto", "navigator"]) replaceable(name); // so that a cell may declare them as its own
globalThis.display = (...values) => values.forEach((v) => show(bundle(v)));
globalThis.$$ = shown;
// What a cell requires and imports is looked for where it runs, not where this file lies.
globalThis.require = moduleLib.createRequire(path.join(process.cwd(), "cell.js"));
globalThis.module = new moduleLib.Module("<cell>");
globalThis.exports = globalThis.module.exports;

/** Our own console: the REPL's would write to its output. */
globalThis.console = new console.Console({ stdout: process.stdout, stderr: process.stderr });

function replaceable(name) {
  const found = Object.getOwnPropertyDescriptor(globalThis, name);
  if (!found || !found.configurable || found.set || found.writable) return;
  const set = (value) => Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: true });
  Object.defineProperty(globalThis, name, { ...found, set });
}

let count = 1;

function next() {
  if (running || waiting.length === 0) return;
  run(waiting.shift());
}

function run(request) {
  const before = process.cpuUsage();
  const undo = enter(request);
  let over = false;
  const finish = (outcome) => {
    if (over) return;
    over = true;
    undo();
    const spent = process.cpuUsage(before);
    if (!request.silent) count++;
    send({ type: "end", end: { outcome, usage: { cpu_ms: (spent.user + spent.system) / 1000, peak_bytes: process.resourceUsage().maxRSS * 1024 } } });
    running = null;
    setImmediate(next);
  };
  running = {
    rich: Boolean(request.rich),
    fail(error, outcome) {
      if (over) return;
      tellError(error);
      finish(outcome || "error");
    },
    interrupt() {
      this.fail(interrupted(), "interrupted");
    },
  };
  const cell = running;
  send({ type: "started", count });
  const conclude = (error, value) => {
    if (over) return;
    if (error) {
      const stopped = error.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED";
      return cell.fail(stopped ? interrupted() : error, stopped ? "interrupted" : "error");
    }
    if (value !== undefined && !request.silent) {
      try {
        show(bundle(value), true);
      } catch (e) {
        return cell.fail(e);
      }
    }
    finish("ok");
  };
  evaluate(request.code || "", (error, value) => {
    // What a cell ends with is shown as what it becomes, as notebooks do.
    if (!error && util.types.isPromise(value)) value.then((v) => conclude(null, v), (e) => conclude(e ?? new Error("rejected")));
    else conclude(error, value);
  });
}

function interrupted() {
  const error = new Error("the cell was interrupted");
  error.name = "KeyboardInterrupt";
  error.stack = "KeyboardInterrupt: the cell was interrupted";
  return error;
}

/** Enter a cell's environment and directory; the function that leaves them. */
function enter(request) {
  const old = {};
  for (const [name, value] of Object.entries(request.env || {})) {
    old[name] = process.env[name];
    process.env[name] = value;
  }
  let cwd = null;
  if (request.cwd) {
    cwd = process.cwd();
    try { process.chdir(request.cwd); } catch (e) { process.stderr.write(String(e.message) + "\n"); }
  }
  return () => {
    for (const [name, value] of Object.entries(old)) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
    if (cwd) try { process.chdir(cwd); } catch { /* it is gone */ }
  };
}

function evaluate(code, done) {
  try {
    code = prepare(code);
  } catch (e) {
    return done(e);
  }
  // Not the REPL's own way to be interrupted: with a listener of ours for the signal it would end the process.
  step = () => server.eval(code + "\n", server.context, `cell${count}`, done);
  try {
    stepper.runInThisContext({ breakOnSigint: true, displayErrors: false });
  } catch (e) {
    while (process.domain) process.domain.exit(); // what was interrupted could not
    done(e);
  }
}

let step = null;
const stepper = new vm.Script("globalThis[Symbol.for('cove.step')]()", { filename: "node:cove" });
Object.defineProperty(globalThis, Symbol.for("cove.step"), { value: () => step() });

// --- languages -------------------------------------------------------------------------------------------------------

/** JavaScript that the REPL takes: types are taken out, imports become calls. */
function prepare(code) {
  if (LANGUAGE === "typescript") code = stripper()(code);
  return rewritten(code);
}

/** The parser that Node's own REPL uses; without it cells are run as they are. */
const acorn = (() => {
  try {
    return require("internal/deps/acorn/acorn/dist/acorn"); // needs --expose-internals
  } catch {
    return null;
  }
})();

/**
 * A cell may be run again, and may be written like a module: at the top level const, let and class become var, imports become
 * calls, and export says nothing. Code that cannot be read is left for the REPL to complain about.
 */
function rewritten(code) {
  let tree;
  try {
    tree = acorn.parse(code, { ecmaVersion: "latest", sourceType: "script", allowAwaitOutsideFunction: true, allowImportExportEverywhere: true });
  } catch {
    return code;
  }
  const edits = [];
  tree.body.forEach((node) => rewrite(node, edits));
  for (const [from, to, text] of edits.sort((a, b) => b[0] - a[0])) code = code.slice(0, from) + text + code.slice(to);
  return code;
}

function rewrite(node, edits) {
  switch (node.type) {
    case "VariableDeclaration":
      if (node.kind !== "const" && node.kind !== "let") return;
      edits.push([node.start, node.start + node.kind.length, "var"]);
      for (const d of node.declarations) if (!d.init) edits.push([d.end, d.end, " = undefined"]);
      return;
    case "ClassDeclaration":
      edits.push([node.start, node.start, `var ${node.id.name} = `], [node.end, node.end, ";"]);
      return;
    case "ImportDeclaration":
      edits.push([node.start, node.end, imported(node)]);
      return;
    case "ExportNamedDeclaration":
    case "ExportDefaultDeclaration": {
      const inner = node.declaration;
      // Without a name a function or a class is no statement of its own.
      const nameless = node.type === "ExportDefaultDeclaration" && /^(Function|Class)/.test(inner.type) && !inner.id;
      edits.push([node.start, inner ? inner.start : node.end, nameless ? "void " : ""]);
      if (inner && (inner.id || inner.type === "VariableDeclaration")) rewrite(inner, edits);
      return;
    }
    case "ExportAllDeclaration":
      edits.push([node.start, node.end, ""]);
  }
}

function imported(node) {
  const get = `await import(${node.source.raw})`;
  const parts = node.specifiers.map((s) => {
    if (s.type === "ImportNamespaceSpecifier") return `${s.local.name} = ${get}`;
    const name = s.type === "ImportDefaultSpecifier" ? "default" : s.imported.raw || s.imported.name;
    return `{ ${name}: ${s.local.name} } = ${get}`;
  });
  return parts.length ? `var ${parts.join(", ")};` : `${get};`;
}

let strip = null;

function stripper() {
  if (strip === null) strip = findStripper();
  return strip;
}

function findStripper() {
  if (typeof moduleLib.stripTypeScriptTypes === "function") {
    return (code) => plainly(() => moduleLib.stripTypeScriptTypes(code, { mode: "transform", sourceMap: false }));
  }
  const ways = [
    ["amaro", (m) => (code) => m.transformSync(code, { mode: "transform" }).code],
    ["esbuild", (m) => (code) => m.transformSync(code, { loader: "ts", format: "esm", target: "esnext", logLevel: "silent" }).code],
    ["typescript", (m) => (code) => m.transpileModule(code, { compilerOptions: { module: 99, target: 99, verbatimModuleSyntax: false } }).outputText],
  ];
  for (const [name, make] of ways) {
    try {
      return make(globalThis.require(name));
    } catch { /* not here */ }
  }
  const error = new Error(`TypeScript needs Node 22.13 or later, or one of the modules amaro, esbuild and typescript; this is Node ${process.versions.node}`);
  error.name = "Unsupported";
  error.stack = `Unsupported: ${error.message}`;
  throw error;
}

/** A syntax error of the stripper's is the cell's. */
function plainly(call) {
  try {
    return call();
  } catch (e) {
    const error = new SyntaxError(String(e.message));
    error.stack = `SyntaxError: ${e.message}`;
    throw error;
  }
}

// --- the process -----------------------------------------------------------------------------------------------------

process.on("SIGINT", () => {
  if (running) running.interrupt();
});
process.on("uncaughtException", tellStray);
process.on("unhandledRejection", tellStray);
server._domain.removeAllListeners("error");
server._domain.on("error", tellStray);

/** An error that no cell waits for: the running cell's, or a line of output between cells. */
function tellStray(error) {
  if (running) running.fail(error);
  else process.stderr.write(`Uncaught ${error instanceof Error ? stackOf(error).join("\n") : textOf(error)}\n`);
}

send({ type: "ready", pid: process.pid, message: `node ${process.versions.node}` });
