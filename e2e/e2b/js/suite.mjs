// What the tests share: sandboxes that end with their test, and the report, one JSON line for each test.
import { appendFileSync } from 'node:fs'
import { randomBytes } from 'node:crypto'
import { test } from 'node:test'
import { Sandbox } from 'e2b'
import { Sandbox as CodeSandbox } from '@e2b/code-interpreter'

export const LIFETIME = 1_200_000 // milliseconds: what a test leaves behind is gone after it

// proves registers a test and the SDK methods, as the compatibility table names them, that it shows to work.
export function proves(methods, name, body) {
  test(name, { timeout: 600_000 }, async (t) => {
    const begun = performance.now()
    const made = []
    const make = async (template, opts) => {
      const sbx = await Sandbox.create(template ?? 'base', { timeoutMs: LIFETIME, ...opts })
      made.push(sbx)
      return sbx
    }
    const makeCode = async (opts) => {
      const sbx = await CodeSandbox.create({ timeoutMs: LIFETIME, ...opts })
      made.push(sbx)
      return sbx
    }
    let why = ''
    try {
      await body({ t, make, makeCode, tag: 't' + randomBytes(6).toString('hex') })
    } catch (err) {
      why = `${err?.name ?? 'Error'}: ${err?.message ?? err}`.split('\n')[0].slice(0, 200)
      throw err
    } finally {
      report({ sdk: 'js', test: name, methods, outcome: why ? 'failed' : 'passed', why, seconds: (performance.now() - begun) / 1000 })
      await Promise.allSettled(made.map((s) => s.kill()))
    }
  })
}

function report(line) {
  if (process.env.E2B_SUITE_REPORT) appendFileSync(process.env.E2B_SUITE_REPORT, JSON.stringify(line) + '\n')
}

// eventually waits until check returns something true, and returns it.
export async function eventually(check, ms = 120_000, every = 100) {
  for (const end = Date.now() + ms; ; ) {
    const got = await check()
    if (got) return got
    if (Date.now() > end) throw new Error(`not so after ${ms} ms: last ${JSON.stringify(got)}`)
    await new Promise((r) => setTimeout(r, every))
  }
}
