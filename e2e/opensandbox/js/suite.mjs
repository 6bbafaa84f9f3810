// What the tests share: sandboxes that end with their test, and the report, one JSON line for each test.
import { appendFileSync } from 'node:fs'
import { randomBytes } from 'node:crypto'
import { test } from 'node:test'
import { Sandbox } from '@alibaba-group/opensandbox'

export const IMAGE = 'opensandbox/code-interpreter:v1.1.0' // a name that the server maps to a template of its own
export const LIFETIME = 1200 // seconds: what a test leaves behind is gone after it

// proves registers a test and the SDK methods, as the compatibility table names them, that it shows to work.
export function proves(methods, name, body) {
  test(name, { timeout: 600_000 }, async (t) => {
    const begun = performance.now()
    const made = []
    const make = async (opts) => {
      const sbx = await Sandbox.create({ timeoutSeconds: LIFETIME, ...(opts?.snapshotId ? {} : { image: IMAGE }), ...opts })
      made.push(sbx)
      return sbx
    }
    let why = ''
    try {
      await body({ t, make, tag: 't' + randomBytes(6).toString('hex') })
    } catch (err) {
      why = `${err?.name ?? 'Error'}: ${err?.message ?? err}`.split('\n')[0].slice(0, 200)
      throw err
    } finally {
      report({ sdk: 'js', test: name, methods, outcome: why ? 'failed' : 'passed', why, seconds: (performance.now() - begun) / 1000 })
      await Promise.allSettled(made.map(async (s) => {
        await s.kill()
        await s.close()
      }))
    }
  })
}

function report(line) {
  if (process.env.OPENSANDBOX_SUITE_REPORT) appendFileSync(process.env.OPENSANDBOX_SUITE_REPORT, JSON.stringify(line) + '\n')
}

// eventually waits until check returns something true, and returns it.
export async function eventually(check, ms = 120_000, every = 50) {
  for (const end = Date.now() + ms; ; ) {
    const got = await check()
    if (got) return got
    if (Date.now() > end) throw new Error(`not so after ${ms} ms: last ${JSON.stringify(got)}`)
    await new Promise((r) => setTimeout(r, every))
  }
}

// out is what a command printed, line by line.
export const out = (execution) => execution.logs.stdout.map((m) => m.text)
