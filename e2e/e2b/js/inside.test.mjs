// Every method of the SDK once: commands, terminals, files, watches, git, code.
import assert from 'node:assert/strict'
import { CommandExitError, FileNotFoundError, FilesystemEventType, NotFoundError, TimeoutError } from 'e2b'
import { eventually, proves } from './suite.mjs'

proves(['commands.run'], 'commands', async ({ make }) => {
  const sbx = await make()
  const heard = []
  const done = await sbx.commands.run('echo out; echo err >&2', { onStdout: (s) => heard.push(s), onStderr: (s) => heard.push(s) })
  assert.deepEqual([done.stdout, done.stderr, done.exitCode, heard.sort()], ['out\n', 'err\n', 0, ['err\n', 'out\n']])
  await assert.rejects(sbx.commands.run('exit 5'), (e) => e instanceof CommandExitError && e.exitCode === 5)
  await assert.rejects(sbx.commands.run('sleep 3600', { timeoutMs: 1_000 }), TimeoutError)
  assert.equal((await sbx.commands.run('whoami; pwd', { user: 'root', cwd: '/tmp' })).stdout, 'root\n/tmp\n')
  assert.equal((await sbx.commands.run("printf 'a%.0s' $(seq 8191); printf '\\xe2'")).stdout, 'a'.repeat(8191) + '\ufffd')
})

proves(['commands.run', 'commands.list', 'commands.kill', 'CommandHandle.kill', 'CommandHandle.wait'], 'background commands', async ({ make }) => {
  const sbx = await make()
  const handle = await sbx.commands.run('echo begun; sleep 3600', { background: true })
  assert.ok((await sbx.commands.list()).some((p) => p.pid === handle.pid))
  await eventually(() => handle.stdout === 'begun\n')
  assert.equal(await handle.kill(), true)
  await assert.rejects(handle.wait(), (e) => e instanceof CommandExitError && e.exitCode === -1 && e.error === 'signal: killed')
  assert.equal(await sbx.commands.kill(999_999), false)
})

proves(['commands.connect', 'CommandHandle.disconnect'], 'disconnect and connect', async ({ make }) => {
  const sbx = await make()
  const handle = await sbx.commands.run('until [ -e /tmp/go ]; do sleep 0.01; done; echo late; exit 2', { background: true, timeoutMs: 120_000 })
  await handle.disconnect()
  const again = await sbx.commands.connect(handle.pid, { timeoutMs: 120_000 })
  await sbx.files.write('/tmp/go', '')
  await assert.rejects(again.wait(), (e) => e.exitCode === 2 && e.stdout === 'late\n')
  await assert.rejects(sbx.commands.connect(999_999), NotFoundError)
})

proves(['commands.sendStdin', 'commands.closeStdin', 'CommandHandle.sendStdin', 'CommandHandle.closeStdin'], 'stdin', async ({ make }) => {
  const sbx = await make()
  const handle = await sbx.commands.run('cat', { background: true, stdin: true })
  await sbx.commands.sendStdin(handle.pid, 'one ')
  await handle.sendStdin('two')
  await handle.closeStdin()
  assert.equal((await handle.wait()).stdout, 'one two')
  const other = await sbx.commands.run('cat', { background: true, stdin: true })
  await sbx.commands.closeStdin(other.pid)
  assert.equal((await other.wait()).exitCode, 0)
})

proves(['pty.create', 'pty.sendInput', 'pty.resize', 'pty.connect', 'pty.kill'], 'terminals', async ({ make }) => {
  const sbx = await make()
  let seen = ''
  const onData = (d) => void (seen += new TextDecoder().decode(d))
  const handle = await sbx.pty.create({ cols: 80, rows: 24, onData, envs: { WORD: 'w' } })
  const send = (text) => sbx.pty.sendInput(handle.pid, new TextEncoder().encode(text))
  await send('echo c=$(tput cols).$WORD\n')
  await eventually(() => seen.includes('c=80.w'))
  await sbx.pty.resize(handle.pid, { cols: 99, rows: 30 })
  await send('echo c=$(tput cols).\n')
  await eventually(() => seen.includes('c=99.'))
  const again = await sbx.pty.connect(handle.pid, { onData })
  assert.equal(again.pid, handle.pid)
  assert.equal(await sbx.pty.kill(handle.pid), true)
  await eventually(async () => !(await sbx.pty.kill(handle.pid)))
})

proves(['files.write', 'files.read', 'files.writeFiles', 'files.getInfo'], 'files', async ({ make }) => {
  const sbx = await make()
  const info = await sbx.files.write('d/f', 'grüße', { metadata: { k: 'v' } })
  assert.deepEqual([info.name, info.path, info.type], ['f', '/home/user/d/f', 'file'])
  assert.equal(await sbx.files.read('d/f'), 'grüße')
  assert.equal(new TextDecoder().decode(await sbx.files.read('d/f', { format: 'bytes' })), 'grüße')
  assert.equal(await (await sbx.files.read('d/f', { format: 'blob' })).text(), 'grüße')
  assert.equal(await new Response(await sbx.files.read('d/f', { format: 'stream' })).text(), 'grüße')
  const stat = await sbx.files.getInfo('d/f')
  assert.deepEqual([stat.metadata, stat.owner, stat.mode, stat.size], [{ k: 'v' }, 'user', 0o644, 7])
  await sbx.files.write([{ path: 'a', data: '1' }, { path: 'b', data: new Blob(['2']) }])
  await sbx.files.writeFiles([{ path: 'c', data: '3' }], { gzip: true })
  await sbx.files.write('e', new Response('4').body)
  for (const [name, text] of [['a', '1'], ['b', '2'], ['c', '3'], ['e', '4']]) assert.equal(await sbx.files.read(name, { gzip: name === 'c' }), text)
  await assert.rejects(sbx.files.read('nothing'), FileNotFoundError)
  const many = Array.from({ length: 30 }, (_, i) => sbx.files.write(`many/${i}`, String(i)))
  await Promise.all(many)
  assert.equal((await sbx.files.list('many')).length, 30)
})

proves(['files.makeDir', 'files.list', 'files.exists', 'files.rename', 'files.remove'], 'directories', async ({ make }) => {
  const sbx = await make()
  assert.equal(await sbx.files.makeDir('x/d'), true)
  assert.equal(await sbx.files.makeDir('x/d'), false)
  await sbx.files.write('x/d/f', '')
  assert.deepEqual((await sbx.files.list('x', { depth: 2 })).map((e) => [e.name, e.type]), [['d', 'dir'], ['f', 'file']])
  assert.equal((await sbx.files.rename('x/d', 'x/e')).path, '/home/user/x/e')
  assert.deepEqual([await sbx.files.exists('x/e/f'), await sbx.files.exists('x/d')], [true, false])
  await sbx.files.remove('x')
  await sbx.files.remove('x')
  await assert.rejects(sbx.files.list('x'), FileNotFoundError)
})

proves(['files.watchDir', 'WatchHandle.stop'], 'watches', async ({ make }) => {
  const sbx = await make()
  await sbx.files.makeDir('w')
  const events = []
  let ended = false
  const watch = await sbx.files.watchDir('w', (e) => void events.push(e), { recursive: true, includeEntry: true, onExit: () => void (ended = true) })
  await sbx.files.write('w/f', 'x')
  await eventually(() => events.length >= 3)
  assert.deepEqual(events.map((e) => [e.name, e.type]), [['f', FilesystemEventType.CREATE], ['f', FilesystemEventType.CHMOD], ['f', FilesystemEventType.WRITE]])
  assert.equal(events[0].entry.path, '/home/user/w/f')
  await watch.stop()
  await eventually(() => ended)
  await assert.rejects(sbx.files.watchDir('nothing', () => {}), FileNotFoundError)
})

proves(['git.init', 'git.configureUser', 'git.add', 'git.commit', 'git.status', 'git.branches', 'git.createBranch', 'git.checkoutBranch', 'git.deleteBranch', 'git.reset', 'git.restore', 'git.remoteAdd', 'git.remoteGet', 'git.push', 'git.pull', 'git.clone', 'git.setConfig', 'git.getConfig', 'git.dangerouslyAuthenticate'], 'git', async ({ make }) => {
  const sbx = await make()
  const [git, repo, bare] = [sbx.git, '/home/user/repo', '/home/user/bare.git']
  await git.init(bare, { bare: true, initialBranch: 'main' })
  await git.init(repo, { initialBranch: 'main' })
  await git.configureUser('Ada', 'ada@example.com')
  await sbx.files.write(`${repo}/a`, '1')
  await git.add(repo)
  await git.commit(repo, 'first')
  assert.equal((await git.status(repo)).isClean, true)
  await git.createBranch(repo, 'side')
  await git.checkoutBranch(repo, 'main')
  await git.deleteBranch(repo, 'side')
  assert.deepEqual((await git.branches(repo)).branches, ['main'])
  await sbx.files.write(`${repo}/a`, '2')
  await git.add(repo)
  await git.restore(repo, { paths: ['a'], staged: true })
  await git.reset(repo, { mode: 'hard' })
  assert.equal(await sbx.files.read(`${repo}/a`), '1')
  await git.remoteAdd(repo, 'origin', `file://${bare}`)
  assert.equal(await git.remoteGet(repo, 'origin'), `file://${bare}`)
  await git.push(repo, { remote: 'origin', branch: 'main' })
  await git.clone(`file://${bare}`, { path: '/home/user/copy' })
  await git.pull('/home/user/copy')
  await git.setConfig('pull.rebase', 'true', { scope: 'local', path: repo })
  assert.equal(await git.getConfig('pull.rebase', { scope: 'local', path: repo }), 'true')
  await git.dangerouslyAuthenticate({ username: 'someone', password: 'token', host: 'git.example.com' })
})

proves(['runCode'], 'code', async ({ makeCode }) => {
  const sbx = await makeCode({ envs: { GLOBAL: 'g' } })
  const heard = []
  const run = await sbx.runCode("print('said ü')\n40 + 2", { onStdout: (m) => heard.push(m.line), onResult: (r) => heard.push(r.text) })
  assert.deepEqual([run.text, heard, run.executionCount], ['42', ['said ü\n', '42'], 1])
  const errors = []
  const failed = await sbx.runCode('1/0', { onError: (e) => errors.push(e.name) })
  assert.deepEqual([failed.error.name, errors], ['ZeroDivisionError', ['ZeroDivisionError']])
  assert.equal((await sbx.runCode("import os; os.environ['ONCE'] + os.environ['GLOBAL']", { envs: { ONCE: 'o' } })).text, 'og')
  await sbx.runCode('kept = 5')
  await assert.rejects(sbx.runCode('while True: pass', { timeoutMs: 1_000 }), TimeoutError)
  assert.equal((await sbx.runCode('kept')).text, '5')
})

proves(['runCode'], 'results of every kind', async ({ makeCode }) => {
  const sbx = await makeCode()
  const chart = await sbx.runCode('import matplotlib.pyplot as plt\nplt.plot([1,2],[3,4])\nplt.show()')
  const shown = chart.results.find((r) => r.png)
  assert.deepEqual([shown.chart.type, shown.chart.elements[0].points], ['line', [[1, 3], [2, 4]]])
  const frame = await sbx.runCode("import pandas as pd\npd.DataFrame({'a': [1, 2]})")
  assert.deepEqual(frame.results[0].data, { a: [1, 2] })
  assert.ok(frame.results[0].formats().includes('html'))
  const own = await sbx.runCode("from IPython.display import display, Markdown\ndisplay(Markdown('# m'))\n{'a': 1}")
  assert.deepEqual(own.results.map((r) => [r.markdown, r.json, r.isMainResult]), [['# m', undefined, false], [undefined, { a: 1 }, true]])
})

proves(['createCodeContext', 'listCodeContexts', 'restartCodeContext', 'removeCodeContext'], 'contexts', async ({ makeCode }) => {
  const sbx = await makeCode()
  assert.deepEqual((await sbx.listCodeContexts()).map((c) => c.language), ['python', 'javascript'])
  const context = await sbx.createCodeContext({ cwd: '/tmp', language: 'python' })
  assert.equal((await sbx.runCode('import os; x = 1; os.getcwd()', { context })).text, '/tmp')
  await sbx.restartCodeContext(context)
  assert.equal((await sbx.runCode('x', { context })).error.name, 'NameError')
  await sbx.removeCodeContext(context.id)
  await assert.rejects(sbx.runCode('1', { context }), NotFoundError)
})

proves(['runCode'], 'bash', async ({ makeCode }) => {
  const sbx = await makeCode()
  await sbx.runCode('cd /tmp; word=kept', { language: 'bash' })
  assert.equal((await sbx.runCode('pwd; echo $word', { language: 'bash' })).logs.stdout.join(''), '/tmp\nkept\n')
})

proves(['runCode'], 'a kill in the middle of code', async ({ makeCode }) => {
  const sbx = await makeCode()
  const code = "import time; print('begun', flush=True); time.sleep(3600)"
  let run
  await new Promise((begun) => {
    run = assert.rejects(sbx.runCode(code, { onStdout: begun, timeoutMs: 120_000 }), TimeoutError)
  })
  await sbx.kill()
  await run
})
