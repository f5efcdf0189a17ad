// Package testkit gives tests the parts that must be real: a Postgres with every migration, a Redis, and small helpers.
//
// It owns one Postgres per test process, or uses the one named by GPUAAS_TEST_PG, which `go run ./devstack/sharedpg --
// go test ...` shares over all packages; and one database per test, cloned from a template keyed by the hash of the
// migrations. The servers themselves are devstack's: the kit starts and ends them, and is the one package of internal
// that may import devstack. It assumes nothing about other tests: no two tests share a database. It never skips a test
// except under -short, and never appears in a binary that ships.
//
// Guarantees: everything that a test opened through it is closed and dropped when the test ends; the mesh clock of a
// test database can be moved.
package testkit
