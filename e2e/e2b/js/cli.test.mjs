// The official command line program.
import assert from 'node:assert/strict'
import { execFile, spawn } from 'node:child_process'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'
import { Sandbox } from 'e2b'
import { LIFETIME, eventually, proves } from './suite.mjs'

const program = join(dirname(createRequire(import.meta.url).resolve('@e2b/cli/package.json')), 'dist', 'index.js')

// e2b runs the program with a home of its own, so that nobody's login is used, and gives back how it ended.
function e2b(args, { cwd, input } = {}) {
  const home = mkdtempSync(join(tmpdir(), 'cove-e2b-home-'))
  return new Promise((resolve) => {
    const env = { ...process.env, HOME: home, NO_COLOR: '1', CI: '1' }
    const child = execFile(process.execPath, [program, ...args], { env, cwd, timeout: 600_000 }, (err, stdout, stderr) =>
      resolve({ code: err ? (err.code ?? -1) : 0, stdout, stderr }),
    )
    child.stdin.end(input ?? '')
  })
}

async function ok(args, opts) {
  const done = await e2b(args, opts)
  assert.equal(done.code, 0, `e2b ${args.join(' ')}: ${done.stdout}${done.stderr}`)
  return done.stdout
}

proves(['e2b sandbox list', 'e2b sandbox info', 'e2b sandbox kill'], 'list, info, kill', async ({ make, tag }) => {
  const sbx = await make('base', { metadata: { id: tag } })
  const listed = JSON.parse(await ok(['sandbox', 'list', '--metadata', `id=${tag}`, '--format', 'json']))
  assert.deepEqual(listed.map((s) => s.sandboxId), [sbx.sandboxId])
  assert.match(await ok(['sandbox', 'list', '--metadata', `id=${tag}`]), new RegExp(sbx.sandboxId))
  assert.equal(JSON.parse(await ok(['sandbox', 'info', sbx.sandboxId, '--format', 'json'])).sandboxId, sbx.sandboxId)
  await ok(['sandbox', 'kill', sbx.sandboxId])
  assert.equal(await sbx.isRunning(), false)
})

proves(['e2b sandbox exec'], 'exec', async ({ make }) => {
  const sbx = await make()
  assert.match(await ok(['sandbox', 'exec', sbx.sandboxId, 'echo', 'from the cli']), /from the cli/)
  assert.match(await ok(['sandbox', 'exec', '-u', 'root', '-c', '/tmp', '-e', 'WORD=w', sbx.sandboxId, 'whoami; pwd; echo $WORD']), /root\n\/tmp\nw/)
  assert.equal((await e2b(['sandbox', 'exec', sbx.sandboxId, 'exit 7'])).code, 7)
})

proves(['e2b sandbox create', 'e2b sandbox pause', 'e2b sandbox resume'], 'create, pause, resume', async () => {
  const out = await ok(['sandbox', 'create', 'base', '--detach', '--timeout', '600'])
  const id = out.match(/\bi?[a-z0-9]{15,}\b/)?.[0]
  assert.ok(id, out)
  try {
    await ok(['sandbox', 'pause', id])
    assert.equal((await Sandbox.getInfo(id)).state, 'paused')
    await ok(['sandbox', 'resume', id])
    assert.equal((await Sandbox.getInfo(id)).state, 'running')
  } finally {
    await Sandbox.kill(id)
  }
})

proves(['e2b sandbox connect'], 'a terminal', async ({ make }) => {
  const sbx = await make()
  const child = spawn('script', ['-qec', `${process.execPath} ${program} sandbox connect ${sbx.sandboxId}`, '/dev/null'], { env: { ...process.env, NO_COLOR: '1' } })
  let seen = ''
  child.stdout.on('data', (d) => void (seen += d))
  try {
    await eventually(() => /[$#] ?$/m.test(seen.trimEnd()) || seen.includes('user@'))
    child.stdin.write('echo c$((1+1))l\n')
    await eventually(() => seen.includes('c2l'))
  } finally {
    child.stdin.end('exit\n')
    await eventually(() => child.exitCode !== null, 60_000).catch(() => child.kill('SIGKILL'))
  }
})

proves(['e2b sandbox logs'], 'logs', async ({ make }) => {
  const sbx = await make()
  await sbx.commands.run('echo logged')
  const out = await eventually(async () => {
    const said = await ok(['sandbox', 'logs', sbx.sandboxId, '--format', 'json', '--level', 'DEBUG'])
    return said.trim() && said
  })
  assert.match(out, /"level"/)
})

proves(['e2b sandbox metrics'], 'metrics', async ({ make }) => {
  const sbx = await make()
  await eventually(async () => (await sbx.getMetrics()).length, 120_000, 500)
  assert.match(await ok(['sandbox', 'metrics', sbx.sandboxId, '--format', 'json']), /cpuUsedPct|cpu/i)
})

proves(['e2b sandbox snapshot create', 'e2b sandbox snapshot list', 'e2b sandbox snapshot delete'], 'snapshots', async ({ make }) => {
  const sbx = await make()
  await ok(['sandbox', 'snapshot', 'create', sbx.sandboxId])
  const [{ snapshotId }] = await sbx.listSnapshots().nextItems()
  assert.match(await ok(['sandbox', 'snapshot', 'list', sbx.sandboxId]), new RegExp(snapshotId.split(':')[0].split('/').pop()))
  await ok(['sandbox', 'snapshot', 'delete', snapshotId])
  assert.deepEqual(await sbx.listSnapshots().nextItems(), [])
})

proves(['e2b template create', 'e2b template list', 'e2b template unpublish', 'e2b template delete'], 'templates', async ({ make, tag }) => {
  const dir = mkdtempSync(join(tmpdir(), 'cove-e2b-'))
  writeFileSync(join(dir, 'e2b.Dockerfile'), 'FROM e2bdev/base\nCOPY greeting /greeting\nRUN echo built > /built\n')
  writeFileSync(join(dir, 'greeting'), 'hi')
  await ok(['template', 'create', tag, '--path', dir, '--memory-mb', '512', '--cpu-count', '1'], { cwd: dir })
  const listed = JSON.parse(await ok(['template', 'list', '--format', 'json']))
  assert.ok(listed.some((t) => [...(t.aliases ?? []), ...(t.names ?? [])].some((n) => n.includes(tag))), JSON.stringify(listed))
  const sbx = await make(tag, { timeoutMs: LIFETIME })
  assert.equal(await sbx.files.read('/greeting', { user: 'root' }), 'hi')
  const published = await e2b(['template', 'publish', tag, '--yes'])
  assert.ok(published.code !== 0 && /cannot be published/.test(published.stdout + published.stderr), JSON.stringify(published))
  await ok(['template', 'unpublish', tag, '--yes'])
  await ok(['template', 'delete', tag, '--yes'])
})
