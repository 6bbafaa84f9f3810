// Package archtest keeps the shape of the repository: who may import whom, what the agent links, that every package
// says what it is for, and that links between documents lead somewhere. It is all tests; nothing imports it.
package archtest
