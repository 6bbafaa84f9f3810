// Commands and files, by the JavaScript SDK.
import assert from 'node:assert/strict'
import { after, before } from 'node:test'
import { Sandbox } from '@alibaba-group/opensandbox'
import { IMAGE, eventually, out, proves } from './suite.mjs'

let sbx
before(async () => {
  sbx = await Sandbox.create({ image: IMAGE, timeoutSeconds: 7200 })
})
after(async () => {
  await sbx.kill()
  await sbx.close()
})

proves(['commands.run'], 'output, exit codes and errors', async () => {
  const ok = await sbx.commands.run('echo one; echo two >&2')
  assert.deepEqual([out(ok), ok.logs.stderr.map((m) => m.text), ok.exitCode, ok.error], [['one'], ['two'], 0, undefined])
  const failed = await sbx.commands.run('exit 3')
  assert.deepEqual([failed.error.name, failed.error.value, failed.exitCode], ['CommandExecError', '3', 3])
  assert.equal((await sbx.commands.run('no-such-program')).exitCode, 127)
  assert.deepEqual(out(await sbx.commands.run("printf 'a\\u0085b \\u2028 ü 🙂\\n'")), ['a\u0085b \u2028 ü 🙂'])
})

proves(['commands.run'], 'where and with what it runs', async () => {
  assert.deepEqual(out(await sbx.commands.run('pwd; echo $A; id -u; id -g', { workingDirectory: '/usr', envs: { A: 'b' }, uid: 1234, gid: 2345 })), ['/usr', 'b', '1234', '2345'])
  const begun = Date.now()
  assert.equal((await sbx.commands.run('sleep 3600', { timeoutSeconds: 1 })).exitCode, -1)
  assert.ok(Date.now() - begun < 50_000)
  await assert.rejects(sbx.commands.run('pwd', { workingDirectory: '/none' }), (err) => err.statusCode === 400)
})

proves(['commands.run', 'commands.runStream'], 'events come live', async ({ tag }) => {
  const seen = []
  const command = `echo a; until [ -e /tmp/${tag} ]; do sleep 0.01; done; echo b`
  await sbx.commands.run(command, { timeoutSeconds: 120 }, {
    onInit: () => seen.push('init'),
    onStdout: async (m) => {
      seen.push(m.text)
      if (m.text === 'a') await sbx.files.writeFiles([{ path: `/tmp/${tag}`, data: 'the first line is here' }])
    },
    onExecutionComplete: () => seen.push('complete'),
  })
  assert.deepEqual(seen, ['init', 'a', 'b', 'complete'])
  const types = []
  for await (const event of sbx.commands.runStream('echo streamed')) if (event.type !== 'ping') types.push(event.type)
  assert.deepEqual(types, ['init', 'stdout', 'execution_complete'])
})

proves(['commands.getCommandStatus', 'commands.getBackgroundCommandLogs', 'commands.interrupt'], 'a command in the background', async () => {
  const { id } = await sbx.commands.run('echo begun; sleep 3600', { background: true })
  const logs = await eventually(async () => {
    const l = await sbx.commands.getBackgroundCommandLogs(id)
    return l.content.includes('begun') && l
  })
  assert.equal((await sbx.commands.getBackgroundCommandLogs(id, logs.cursor)).content, '')
  assert.equal((await sbx.commands.getCommandStatus(id)).running, true)
  await sbx.commands.interrupt(id)
  await eventually(async () => !(await sbx.commands.getCommandStatus(id)).running)
  await assert.rejects(sbx.commands.interrupt('none'))
})

proves(['commands.createSession', 'commands.runInSession', 'commands.deleteSession'], 'a session remembers', async () => {
  const session = await sbx.commands.createSession({ workingDirectory: '/usr' })
  await sbx.commands.runInSession(session, 'export A=1; cd lib')
  assert.deepEqual(out(await sbx.commands.runInSession(session, 'echo $A; pwd')), ['1', '/usr/lib'])
  assert.equal((await sbx.commands.runInSession(session, '(exit 7)')).exitCode, 7)
  await sbx.commands.deleteSession(session)
  await assert.rejects(sbx.commands.runInSession(session, 'true'))
})

proves(['files.writeFiles', 'files.readFile', 'files.readBytes', 'files.readBytesStream', 'files.getFileInfo'], 'reading and writing', async ({ tag }) => {
  const at = `/tmp/${tag}`
  const data = new Uint8Array(300_000).map((_, i) => i)
  const parts = async function* () {
    yield data.subarray(0, 100_000)
    yield data.subarray(100_000)
  }
  await sbx.files.writeFiles([
    { path: `${at}/a b.txt`, data: 'ü\n' }, { path: `${at}/bytes`, data, mode: 600 }, { path: `${at}/parts`, data: parts() }, { path: `${at}/blob`, data: new Blob(['blob']) },
  ])
  assert.equal(await sbx.files.readFile(`${at}/a b.txt`), 'ü\n')
  assert.deepEqual(Buffer.from(await sbx.files.readBytes(`${at}/bytes`)), Buffer.from(data))
  assert.deepEqual(Buffer.from(await sbx.files.readBytes(`${at}/parts`, { range: 'bytes=5-9' })), Buffer.from(data.subarray(5, 10)))
  let streamed = 0
  for await (const chunk of sbx.files.readBytesStream(`${at}/parts`)) streamed += chunk.length
  assert.equal(streamed, 300_000)
  const info = await sbx.files.getFileInfo([`${at}/bytes`, `${at}/blob`])
  assert.deepEqual([info[`${at}/bytes`].mode, info[`${at}/blob`].size], [600, 4])
  await assert.rejects(sbx.files.readFile(`${at}/none`), (err) => err.statusCode === 404)
})

proves(
  ['files.createDirectories', 'files.deleteDirectories', 'files.listDirectory', 'files.moveFiles', 'files.deleteFiles', 'files.replaceContents', 'files.replaceContentsDetailed', 'files.search', 'files.setPermissions'],
  'the rest of files',
  async ({ tag }) => {
    const at = `/tmp/${tag}`
    const { files } = sbx
    await files.createDirectories([{ path: `${at}/d`, mode: 755 }])
    await files.writeFiles([{ path: `${at}/d/a.py`, data: '1 1' }])
    await files.moveFiles([{ src: `${at}/d/a.py`, dest: `${at}/e/b.py` }])
    await files.replaceContents([{ path: `${at}/e/b.py`, oldContent: '1', newContent: '2' }])
    const counted = await files.replaceContentsDetailed([{ path: `${at}/e/b.py`, oldContent: '2', newContent: '3' }])
    assert.equal(counted[0].replacedCount, 2)
    await files.setPermissions([{ path: `${at}/e/b.py`, mode: 640 }])
    assert.deepEqual((await files.search({ path: at, pattern: '*.py' })).map((f) => [f.path, f.mode]), [[`${at}/e/b.py`, 640]])
    assert.deepEqual((await files.listDirectory({ path: at })).map((f) => f.path), [`${at}/d`, `${at}/e`])
    await files.deleteFiles([`${at}/e/b.py`])
    await files.deleteDirectories([at])
    await assert.rejects(files.getFileInfo([at]), (err) => err.statusCode === 404)
  },
)

proves(['isolation.capabilities', 'credentialVault.get'], 'what is not there says so', async () => {
  const answer = await sbx.isolation.capabilities().catch((err) => err)
  assert.ok(answer.available === false || answer.message.length > 5)
  await assert.rejects(sbx.credentialVault.get(), (err) => err.message.length > 5)
})
