// Every method of the SDK once: sandboxes, snapshots, network, URLs, templates, the client object.
import assert from 'node:assert/strict'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { AuthenticationError, BuildError, E2B, NotFoundError, Sandbox, SandboxError, SandboxNotFoundError, Template, TimeoutError, waitForPort } from 'e2b'
import { LIFETIME, eventually, proves } from './suite.mjs'

proves(['Sandbox.create', 'Sandbox.getInfo', 'Sandbox.isRunning', 'Sandbox.kill'], 'a life', async ({ make, tag }) => {
  const sbx = await make('base', { metadata: { id: tag }, envs: { WORD: 'w' } })
  assert.equal(await sbx.isRunning(), true)
  const info = await sbx.getInfo()
  assert.deepEqual([info.sandboxId, info.metadata, info.state, info.name], [sbx.sandboxId, { id: tag }, 'running', 'base'])
  assert.deepEqual(info.lifecycle, { onTimeout: 'kill', autoResume: false })
  assert.equal((await sbx.commands.run('echo $WORD')).stdout, 'w\n')
  assert.equal((await Sandbox.getInfo(sbx.sandboxId)).sandboxId, sbx.sandboxId)
  assert.equal(await sbx.kill(), true)
  assert.equal(await sbx.kill(), false)
  assert.equal(await Sandbox.kill('nonexistingsandbox'), false)
  assert.equal(await sbx.isRunning(), false)
  await assert.rejects(sbx.getInfo(), SandboxNotFoundError)
})

proves(['Sandbox.create'], 'defaults of the server', async () => {
  const sbx = await Sandbox.create()
  const { startedAt, endAt } = await sbx.getInfo()
  await sbx.kill()
  assert.ok(Math.abs(endAt - startedAt - 300_000) < 60_000)
})

proves(['Sandbox.create'], 'what cannot be created', async () => {
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
  await assert.rejects(Sandbox.create('no-such-template'), (e) => e instanceof SandboxError && /404/.test(e.message))
})

proves(['Sandbox.connect', 'Sandbox.setTimeout'], 'connect and timeouts', async ({ make }) => {
  const sbx = await make('base', { timeoutMs: 1_000_000 })
  const before = (await sbx.getInfo()).endAt
  await Sandbox.connect(sbx.sandboxId, { timeoutMs: 100_000 })
  assert.deepEqual((await sbx.getInfo()).endAt, before)
  await sbx.connect({ timeoutMs: 3_000_000 })
  assert.ok((await sbx.getInfo()).endAt > before)
  await sbx.setTimeout(200_000)
  assert.ok((await sbx.getInfo()).endAt < before)
  await Sandbox.setTimeout(sbx.sandboxId, 1_000_000)
  await assert.rejects(Sandbox.connect('nonexistingsandbox'), NotFoundError)
  await assert.rejects(Sandbox.setTimeout('nonexistingsandbox', 1000), SandboxNotFoundError)
})

proves(['Sandbox.setTimeout'], 'a timeout ends a sandbox', async ({ make }) => {
  const sbx = await make()
  await sbx.setTimeout(1_000)
  // isRunning asks the sandbox itself, and fails while it ends.
  await eventually(() => sbx.getInfo().then(() => false, (e) => e instanceof SandboxNotFoundError))
  assert.equal(await sbx.isRunning(), false)
})

proves(['Sandbox.list'], 'lists by metadata, state and page', async ({ make, tag }) => {
  const a = await make('base', { metadata: { id: tag, 'k&y': 'v=1 %ü' } })
  const b = await make('base', { metadata: { id: tag } })
  await b.pause()
  const ids = async (query, opts = {}) => {
    const pages = Sandbox.list({ query: { metadata: { id: tag }, ...query }, ...opts })
    const got = []
    while (pages.hasNext) got.push(...(await pages.nextItems()).map((s) => s.sandboxId))
    return got
  }
  assert.deepEqual(await ids({}, { limit: 1 }), [b.sandboxId, a.sandboxId])
  assert.deepEqual(await ids({}, { limit: 1, order: 'asc' }), [a.sandboxId, b.sandboxId])
  assert.deepEqual(await ids({ state: ['paused'] }), [b.sandboxId])
  assert.deepEqual(await ids({ metadata: { 'k&y': 'v=1 %ü' } }), [a.sandboxId])
  assert.deepEqual(await ids({ template: 'base', state: ['running'] }), [a.sandboxId])
  assert.deepEqual(await ids({ startedAfter: new Date(Date.now() + 60_000) }), [])
})

proves(['Sandbox.pause', 'Sandbox.betaPause', 'Sandbox.connect'], 'pause and resume', async ({ make }) => {
  const sbx = await make()
  await sbx.files.write('kept', 'x')
  assert.equal(await sbx.pause(), true)
  assert.equal(await Sandbox.pause(sbx.sandboxId), false)
  assert.equal(await sbx.betaPause(), false)
  assert.equal(await sbx.isRunning(), false)
  assert.equal((await sbx.getInfo()).state, 'paused')
  await assert.rejects(sbx.files.read('kept'), TimeoutError)
  await sbx.connect({ timeoutMs: LIFETIME })
  assert.equal(await sbx.files.read('kept'), 'x')
  await assert.rejects(Sandbox.pause('nonexistingsandbox'), SandboxNotFoundError)
})

proves(['Sandbox.create'], 'a timeout may pause, and traffic resumes', async ({ make }) => {
  const sbx = await make('base', { lifecycle: { onTimeout: 'pause', autoResume: true } })
  await sbx.setTimeout(1_000)
  await eventually(async () => (await sbx.getInfo()).state === 'paused')
  assert.equal((await sbx.commands.run('echo awake')).stdout, 'awake\n')
})

proves(['Sandbox.pause'], 'a pause of files alone', async ({ make }) => {
  const sbx = await make()
  const boot = 'cat /proc/sys/kernel/random/boot_id'
  const first = (await sbx.commands.run(boot)).stdout
  await sbx.pause({ keepMemory: false })
  await sbx.connect({ timeoutMs: LIFETIME })
  assert.notEqual((await sbx.commands.run(boot)).stdout, first)
})

proves(['Sandbox.createSnapshot', 'Sandbox.listSnapshots', 'Sandbox.deleteSnapshot'], 'snapshots', async ({ make }) => {
  const sbx = await make()
  await sbx.files.write('kept', 'x')
  const { snapshotId } = await sbx.createSnapshot()
  assert.equal(await (await make(snapshotId)).files.read('kept'), 'x')
  assert.deepEqual((await sbx.listSnapshots().nextItems()).map((s) => s.snapshotId), [snapshotId])
  assert.ok((await Sandbox.listSnapshots({ sandboxId: sbx.sandboxId }).nextItems()).length === 1)
  assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
  await assert.rejects(Sandbox.createSnapshot('nonexistingsandbox'), SandboxNotFoundError)
})

proves(['Sandbox.fork'], 'forks', async ({ make }) => {
  const sbx = await make()
  await sbx.files.write('kept', 'x')
  const forks = await sbx.fork({ count: 2, timeoutMs: LIFETIME })
  assert.equal(forks.length, 2)
  for (const fork of forks) {
    assert.equal(await fork.files.read('kept'), 'x')
    await fork.kill()
  }
  const [one] = await Sandbox.fork(sbx.sandboxId, { timeoutMs: LIFETIME })
  await one.kill()
  await assert.rejects(Sandbox.fork('nonexistingsandbox'), SandboxNotFoundError)
})

proves(['Sandbox.updateNetwork', 'Sandbox.getInfo', 'Sandbox.getFullInfo'], 'the network changes', async ({ make }) => {
  const sbx = await make('base', { network: { denyOut: ['0.0.0.0/0'], allowOut: ['8.8.8.8'] } })
  assert.deepEqual((await sbx.getInfo()).network.allowOut, ['8.8.8.8'])
  await sbx.updateNetwork({ denyOut: ['0.0.0.0/0'], allowOut: ['1.1.1.1'] })
  assert.deepEqual((await Sandbox.getFullInfo(sbx.sandboxId)).network.allowOut, ['1.1.1.1'])
  await assert.rejects(Sandbox.updateNetwork('nonexistingsandbox', {}), SandboxNotFoundError)
})

proves(['Sandbox.getMetrics'], 'metrics', async ({ make }) => {
  const sbx = await make()
  const [sample] = await eventually(async () => {
    const got = await sbx.getMetrics()
    return got.length && got
  }, 120_000, 500)
  assert.ok(sample.memTotal > 0 && sample.cpuCount >= 1 && sample.timestamp instanceof Date)
  const old = new Date(Date.now() - 7_200_000)
  assert.deepEqual(await sbx.getMetrics({ start: old, end: new Date(old.getTime() + 1000) }), [])
  await assert.rejects(Sandbox.getMetrics('nonexistingsandbox'), SandboxNotFoundError)
})

proves(['Sandbox.getHost', 'Sandbox.getMcpUrl', 'Sandbox.uploadUrl', 'Sandbox.downloadUrl'], 'URLs', async ({ make }) => {
  const sbx = await make()
  assert.ok(sbx.getHost(80).startsWith(`80-${sbx.sandboxId}.`))
  assert.ok(sbx.getMcpUrl().endsWith('/mcp'))
  const form = new FormData()
  form.append('file', new Blob(['sent']), 'any')
  const up = await fetch(await sbx.uploadUrl('f'), { method: 'POST', body: form })
  assert.deepEqual([up.status, await up.json()], [200, [{ name: 'f', path: '/home/user/f', type: 'file' }]])
  const url = await sbx.downloadUrl('f', { useSignatureExpiration: 600 })
  assert.equal(await (await fetch(url)).text(), 'sent')
  assert.equal((await fetch(url.replace('v1_', 'v1_A'))).ok, false)
})

proves(['Sandbox.getMcpToken'], 'no MCP token', async ({ make }) => {
  await assert.rejects((await make()).getMcpToken(), /does not exist/)
})

proves(['Sandbox.kill'], 'a kill ends what runs', async ({ make }) => {
  const sbx = await make()
  const handle = await sbx.commands.run('sleep 3600', { background: true })
  const ended = assert.rejects(handle.wait(), TimeoutError)
  await sbx.kill()
  await ended
})

proves(['E2B'], 'the client object', async () => {
  const client = new E2B({ apiKey: process.env.E2B_API_KEY })
  const sbx = await client.Sandbox.create({ timeoutMs: LIFETIME })
  assert.equal(await client.Sandbox.kill(sbx.sandboxId), true)
})

proves(['Template.build', 'Template.copy', 'Template.runCmd', 'Template.setEnvs', 'Template.setWorkdir', 'Template.setUser', 'Template.fromTemplate', 'Template.setStartCmd', 'Template.makeDir', 'Template.makeSymlink', 'Template.remove', 'Template.rename', 'Template.copyItems'], 'a template with files and a server', async ({ make, tag }) => {
  const dir = mkdtempSync(join(tmpdir(), 'cove-e2b-'))
  writeFileSync(join(dir, 'index.html'), 'hello')
  const logs = []
  const template = Template({ fileContextPath: dir })
    .fromTemplate('base')
    .setEnvs({ WORD: 'built in' })
    .makeDir('/home/user/site')
    .copy('index.html', 'site/')
    .copyItems([{ src: 'index.html', dest: '/opt/copy.html', user: 'root' }])
    .makeSymlink('/home/user/site', '/home/user/link')
    .runCmd('touch a b')
    .rename('/home/user/a', '/home/user/c')
    .remove('/home/user/b')
    .setUser('root')
    .runCmd('whoami > /by')
    .setUser('user')
    .setWorkdir('/home/user/site')
    .setStartCmd('python3 -m http.server 8080 --directory /home/user/site', waitForPort(8080))
  const info = await Template.build(template, tag, { onBuildLogs: (l) => logs.push(l) })
  assert.ok(info.templateId && logs.length > 0)
  const sbx = await make(tag)
  const got = await fetch(process.env.E2B_SANDBOX_URL + '/', { headers: { 'E2b-Sandbox-Id': sbx.sandboxId, 'E2b-Sandbox-Port': '8080' } })
  assert.equal(await got.text(), 'hello')
  assert.equal((await sbx.commands.run('echo $WORD; pwd; cat /by; ls /home/user')).stdout, 'built in\n/home/user/site\nroot\nc\nlink\nsite\n')
  await Sandbox.deleteSnapshot(info.templateId)
})

proves(['Template.buildInBackground', 'Template.getBuildStatus', 'Template.exists', 'Template.aliasExists', 'Template.assignTags', 'Template.getTags', 'Template.removeTags', 'Template.skipCache'], 'builds, names and tags', async ({ make, tag }) => {
  assert.equal(await Template.exists(tag), false)
  const info = await Template.buildInBackground(Template().skipCache().fromTemplate('base').runCmd('echo afar'), tag)
  await eventually(async () => (await Template.getBuildStatus(info)).status === 'ready', 600_000, 200)
  assert.equal(await Template.exists(tag), true)
  assert.equal(await Template.aliasExists(tag), true)
  await Template.assignTags(tag, ['one', 'two'])
  await make(`${tag}:one`)
  await Template.removeTags(tag, 'two')
  const tags = (await Template.getTags(tag)).map((t) => t.tag)
  assert.ok(tags.includes('one') && !tags.includes('two'))
  await Sandbox.deleteSnapshot(info.templateId)
})

proves(['Template.fromDockerfile', 'Template.fromBaseImage', 'Template.setReadyCmd'], 'the base image and a Dockerfile', async ({ make, tag }) => {
  const info = await Template.build(Template().fromDockerfile('FROM e2bdev/base\nENV WORD=w\nRUN echo $WORD > /home/user/said\n').setReadyCmd('true'), tag)
  assert.equal(await (await make(tag)).files.read('/home/user/said'), 'w\n')
  await Template.build(Template().fromBaseImage().runCmd('true'), tag)
  await Sandbox.deleteSnapshot(info.templateId)
})

proves(['Template.fromImage'], 'an image of a registry', async ({ make, tag }) => {
  const registry = process.env.E2B_SUITE_REGISTRY
  const info = await Template.build(Template().fromImage(`${registry}/bash:1`).runCmd('cat /etc/made-by > made; sudo whoami >> made'), tag)
  assert.equal(await (await make(tag)).files.read('made'), 'the test\nroot\n')
  await Sandbox.deleteSnapshot(info.templateId)
  await assert.rejects(Template.build(Template().fromImage(`${registry}/no/such:1`).runCmd('true'), tag), BuildError)
})

proves(['Template.build'], 'a failing build', async ({ tag }) => {
  await assert.rejects(Template.build(Template().fromTemplate('base').runCmd('exit 3'), tag), BuildError)
  await assert.rejects(
    Template.build(Template().fromTemplate('base').runCmd('whoami', { user: 'root123' }), tag),
    /failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'/,
  )
})

proves(['Template.toJSON', 'Template.toDockerfile'], 'a template is written down without a server', async () => {
  assert.match(await Template.toJSON(Template().fromTemplate('base').runCmd('true')), /fromTemplate/)
  assert.match(Template.toDockerfile(Template().fromImage('debian').runCmd('true')), /RUN true/)
})
