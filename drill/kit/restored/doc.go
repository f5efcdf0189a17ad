// Package restored has a database that is put back to an earlier copy of itself, and the rollback mode in which the
// control plane finds itself then.
//
// It works on a mesh of the drills' own. It decides nothing about what must follow: that is the drill's.
package restored
