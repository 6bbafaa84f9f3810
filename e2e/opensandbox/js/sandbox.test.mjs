// The life of sandboxes and what leaves them, by the JavaScript SDK.
import assert from 'node:assert/strict'
import { Sandbox, SandboxApiException, SandboxManager } from '@alibaba-group/opensandbox'
import { IMAGE, LIFETIME, eventually, out, proves } from './suite.mjs'

const refused = (status, code) => (err) => err instanceof SandboxApiException && err.statusCode === status && (!code || err.error.code.startsWith(code))

proves(['Sandbox.create', 'Sandbox.getInfo', 'Sandbox.isHealthy', 'Sandbox.kill', 'Sandbox.close'], 'a created sandbox is ready at once', async ({ make }) => {
  const sbx = await make({ metadata: { a: 'b' }, env: { GREETING: 'hello' } })
  assert.ok(await sbx.isHealthy())
  const info = await sbx.getInfo()
  assert.equal(info.status.state, 'Running')
  assert.equal(info.image.uri, IMAGE)
  assert.deepEqual(info.metadata, { a: 'b' })
  assert.deepEqual(out(await sbx.commands.run('echo $GREETING')), ['hello'])
  await sbx.kill()
  await assert.rejects(sbx.getInfo(), refused(404, 'DOCKER::SANDBOX_NOT_FOUND'))
})

proves(['Sandbox.connect', 'Sandbox.renew', 'Sandbox.patchMetadata', 'Sandbox.getMetrics'], 'a sandbox is reached again by its id', async ({ make }) => {
  const sbx = await make()
  const again = await Sandbox.connect({ sandboxId: sbx.id })
  assert.deepEqual(out(await again.commands.run('echo again')), ['again'])
  const { expiresAt } = await again.renew(1200)
  assert.ok(Math.abs(new Date(expiresAt) - Date.now() - 1_200_000) < 10_000)
  assert.deepEqual((await again.patchMetadata({ k: 'v' })).metadata, { k: 'v' })
  const metrics = await again.getMetrics()
  assert.ok(metrics.cpuCount === 1 && metrics.memoryUsedMiB <= metrics.memoryTotalMiB)
  await again.close()
})

proves(['Sandbox.create'], 'without a timeout it never expires', async ({ make }) => {
  const sbx = await make({ timeoutSeconds: null })
  assert.equal((await sbx.getInfo()).expiresAt ?? null, null)
})

proves(['Sandbox.pause', 'Sandbox.resume'], 'a pause keeps files', async ({ make }) => {
  const sbx = await make()
  await sbx.files.writeFiles([{ path: '/tmp/kept', data: 'kept' }])
  await sbx.pause()
  assert.equal((await sbx.getInfo()).status.state, 'Paused')
  assert.equal(await sbx.isHealthy(), false)
  await assert.rejects(sbx.pause(), refused(409))
  const again = await sbx.resume()
  assert.equal(await again.files.readFile('/tmp/kept'), 'kept')
  const third = await (await again.pause(), Sandbox.resume({ sandboxId: sbx.id }))
  assert.ok(await third.isHealthy())
  await third.close()
})

proves(
  ['SandboxManager.listSandboxInfos', 'SandboxManager.getSandboxInfo', 'SandboxManager.patchSandboxMetadata', 'SandboxManager.pauseSandbox', 'SandboxManager.resumeSandbox', 'SandboxManager.renewSandbox', 'SandboxManager.killSandbox'],
  'the manager finds and rules sandboxes',
  async ({ make, tag }) => {
    const manager = SandboxManager.create()
    const a = await make({ metadata: { run: tag, which: 'a' } })
    const b = await make({ metadata: { run: tag, which: 'b' } })
    const ids = async (filter) => (await manager.listSandboxInfos(filter)).items.map((i) => i.id)
    assert.deepEqual(await ids({ metadata: { run: tag } }), [b.id, a.id])
    assert.deepEqual(await ids({ metadata: { run: tag, which: 'a' }, states: ['Running'] }), [a.id])
    await manager.pauseSandbox(a.id)
    assert.deepEqual(await ids({ metadata: { run: tag }, states: ['Paused'] }), [a.id])
    await manager.resumeSandbox(a.id)
    await manager.renewSandbox(a.id, 600)
    assert.deepEqual((await manager.patchSandboxMetadata(a.id, { which: null })).metadata, { run: tag })
    assert.equal((await manager.getSandboxInfo(a.id)).id, a.id)
    await manager.killSandbox(a.id)
    for (const call of [
      () => manager.getSandboxInfo(a.id), () => manager.pauseSandbox(a.id), () => manager.resumeSandbox(a.id),
      () => manager.killSandbox(a.id), () => manager.renewSandbox(a.id, 600),
    ]) await assert.rejects(call, refused(404))
    await manager.close()
  },
)

proves(['SandboxManager.createSnapshot', 'SandboxManager.getSnapshot', 'SandboxManager.listSnapshots', 'SandboxManager.deleteSnapshot'], 'a snapshot starts sandboxes', async ({ make, tag }) => {
  const manager = SandboxManager.create()
  const sbx = await make()
  await sbx.files.writeFiles([{ path: '/srv/kept', data: tag }])
  const shot = await manager.createSnapshot(sbx.id, { name: tag })
  await eventually(async () => (await manager.getSnapshot(shot.id)).status.state === 'Ready')
  assert.deepEqual((await manager.listSnapshots({ sandboxId: sbx.id })).items.map((s) => s.id), [shot.id])
  const born = await make({ snapshotId: shot.id })
  assert.equal(await born.files.readFile('/srv/kept'), tag)
  await born.kill()
  await manager.deleteSnapshot(shot.id)
  await assert.rejects(manager.getSnapshot(shot.id), refused(404, 'SNAPSHOT::NOT_FOUND'))
  await manager.close()
})

proves(['Sandbox.getEgressPolicy', 'Sandbox.patchEgressRules', 'Sandbox.deleteEgressRules'], 'the egress policy is changed while it runs', async ({ make }) => {
  const sbx = await make({ networkPolicy: { defaultAction: 'deny', egress: [{ action: 'allow', target: '192.0.2.1' }] } })
  await sbx.patchEgressRules([{ action: 'allow', target: '198.51.100.0/24' }])
  await sbx.deleteEgressRules(['192.0.2.1'])
  assert.deepEqual(await sbx.getEgressPolicy(), { defaultAction: 'deny', egress: [{ action: 'allow', target: '198.51.100.0/24' }] })
})

proves(['Sandbox.getEndpoint', 'Sandbox.getEndpointUrl', 'Sandbox.getSignedEndpoint'], 'ports have endpoints', async ({ make }) => {
  const sbx = await make()
  const { endpoint, headers } = await sbx.getEndpoint(44772)
  assert.match(endpoint, /\/44772$/)
  assert.equal((await fetch(`http://${endpoint}/ping`, { headers })).status, 200)
  await sbx.files.writeFiles([{ path: '/srv/index.html', data: 'served' }])
  await sbx.commands.run('cd /srv && exec python3 -m http.server 8000', { background: true })
  const web = await sbx.getEndpoint(8000)
  const url = await sbx.getEndpointUrl(8000)
  await eventually(async () => (await fetch(url + '/index.html', { headers: web.headers })).status === 200)
  const signed = await sbx.getSignedEndpoint(8000, Math.floor(Date.now() / 1000) + 60)
  assert.equal(await (await fetch(`http://${signed.endpoint}/index.html`)).text(), 'served')
})

proves(['Sandbox.create (useServerProxy)'], 'everything passes by the proxy', async ({ make }) => {
  const sbx = await make({ connectionConfig: { useServerProxy: true } })
  await sbx.files.writeFiles([{ path: '/tmp/f', data: 'x'.repeat(100_000) }])
  assert.equal((await sbx.files.readFile('/tmp/f')).length, 100_000)
  assert.ok((await sbx.getEndpoint(18080)).endpoint.includes(`/sandboxes/${sbx.id}/proxy/18080`))
})

proves(['Sandbox.create (image)'], 'an image from a registry', async ({ make }) => {
  const sbx = await make({ image: process.env.OPENSANDBOX_SUITE_REGISTRY + '/busybox:1' })
  assert.deepEqual(out(await sbx.commands.run('cat /etc/made-by')), ['the test'])
  const auth = { username: process.env.OPENSANDBOX_SUITE_REGISTRY_USER, password: process.env.OPENSANDBOX_SUITE_REGISTRY_PASSWORD }
  const uri = process.env.OPENSANDBOX_SUITE_REGISTRY + '/private/for-javascript:1'
  assert.deepEqual(out(await (await make({ image: { uri, auth } })).commands.run('echo in')), ['in'])
})

proves(['Sandbox.create (named volume)'], 'a named volume outlives its sandbox', async ({ make, tag }) => {
  const volumes = [{ name: 'v', pvc: { claimName: tag }, mountPath: '/mnt/vol' }]
  await (await make({ volumes })).commands.run('echo kept > /mnt/vol/f')
  assert.deepEqual(out(await (await make({ volumes })).commands.run('cat /mnt/vol/f')), ['kept'])
})

proves(['Sandbox.create'], 'a create that fails rejects and leaves nothing', async ({ tag }) => {
  const manager = SandboxManager.create()
  await assert.rejects(Sandbox.create({ image: `127.0.0.1:1/${tag}`, metadata: { run: tag }, timeoutSeconds: LIFETIME }), (err) => err.message.length > 10)
  await assert.rejects(Sandbox.create({ image: IMAGE, resource: { cpu: 'much' }, timeoutSeconds: LIFETIME }), refused(400))
  assert.deepEqual((await manager.listSandboxInfos({ metadata: { run: tag } })).items, [])
  await manager.close()
})

proves(['Sandbox.waitUntilReady'], 'waiting until it is ready', async ({ make }) => {
  const sbx = await make({ skipHealthCheck: true })
  await sbx.waitUntilReady({ readyTimeoutSeconds: 10, pollingIntervalMillis: 20 })
})
