// The same SDK with E2B_DOMAIN alone: names for hosts, TLS and HTTP/2 instead of headers on plain HTTP.
import assert from 'node:assert/strict'
import { proves } from './suite.mjs'

proves(['Sandbox.create (E2B_DOMAIN)', 'commands.run (E2B_DOMAIN)', 'files.write (E2B_DOMAIN)', 'runCode (E2B_DOMAIN)'], 'names alone find the server', async ({ makeCode }) => {
  assert.equal(process.env.E2B_API_URL ?? process.env.E2B_SANDBOX_URL, undefined)
  const sbx = await makeCode()
  assert.equal((await sbx.commands.run('echo over tls')).stdout, 'over tls\n')
  await Promise.all(Array.from({ length: 30 }, (_, i) => sbx.files.write(`f${i}`, String(i))))
  assert.equal(await sbx.files.read('f29'), '29')
  assert.equal((await sbx.runCode('6 * 7')).text, '42')
})

proves(['Sandbox.getHost (E2B_DOMAIN)', 'Sandbox.downloadUrl (E2B_DOMAIN)'], 'previews and signed URLs', async ({ make }) => {
  const sbx = await make()
  await sbx.commands.run('mkdir -p site && echo hello > site/index.html')
  await sbx.commands.run('cd site && python3 -m http.server 8000', { background: true, timeoutMs: 0 })
  await sbx.commands.run('for i in $(seq 1200); do ss -Htln sport = :8000 | grep -q . && exit 0; sleep 0.1; done; exit 1', { timeoutMs: 0 })
  assert.equal(await (await fetch(`https://${sbx.getHost(8000)}/`)).text(), 'hello\n')
  await sbx.files.write('f', 'x')
  assert.equal(await (await fetch(await sbx.downloadUrl('f'))).text(), 'x')
})
