// Package memory has an identity of a node without a disk, for load generators and tests of sessions. An agent must not
// use it: its certificates and generations are gone with the process.
package memory
