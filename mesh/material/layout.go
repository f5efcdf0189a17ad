// Package material makes what a mesh stands on besides its programs: the authorities, the services' certificates, signing keys with their public
// halves, database passwords, and the files in which each service finds them.
//
// It owns the layout of one directory and believes what already stands there: nothing that exists is made anew, except a service's certificate that is
// near its end or lacks a host. It never contacts a server, and it starts nothing. Guarantees: Make may be run any number of times and by several
// processes at once; every file is on disk before Make returns and no secret is readable by another user.
package material

import (
	"path/filepath"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// Names of the services, as their certificates and roles say them.
const (
	NodeAPI   = "nodeapi"
	Lifecycle = "lifecycle"
	Recovery  = "recovery"
	Readmodel = "readmodel"
)

// Services are all services, in the order in which they are started.
func Services() []string { return []string{Recovery, Lifecycle, NodeAPI, Readmodel} }

// Layout tells where everything stands below one directory.
type Layout struct{ Dir string }

// ServiceCADir holds the issuer of services, with its key.
func (l Layout) ServiceCADir() string { return filepath.Join(l.Dir, "service-ca") }

// ServiceRoots is the PEM file of the issuer of services, without its key: what agents and clients trust.
func (l Layout) ServiceRoots() string { return filepath.Join(l.ServiceCADir(), ca.RootsFile) }

// NodeCADir holds the node authority with its keys.
func (l Layout) NodeCADir() string { return filepath.Join(l.Dir, "node-ca") }

// NodeRoots is the PEM file of the node authority's root: what the agents' port trusts.
func (l Layout) NodeRoots() string { return filepath.Join(l.NodeCADir(), ca.RootsFile) }

// Identity is the PEM file of a service's key and certificate.
func (l Layout) Identity(service string) string {
	return filepath.Join(l.Dir, "identity", service, pki.IdentityFile)
}

// Trust is the PEM file of the issuer by which a service knows its peers.
func (l Layout) Trust(service string) string {
	return filepath.Join(l.Dir, "identity", service, pki.BundleFile)
}

// JoinStateKeyDir holds the private keys of join states; recovery's.
func (l Layout) JoinStateKeyDir() string { return filepath.Join(l.Dir, "keys", "join-state") }

// JoinStatePubkeys is their public half.
func (l Layout) JoinStatePubkeys() string { return filepath.Join(l.Dir, "keys", "join-state.pub") }

// TaskKeyDir holds the key that signs tasks; lifecycle's.
func (l Layout) TaskKeyDir() string { return filepath.Join(l.Dir, "keys", "task-signing") }

// TaskKey is the key itself.
func (l Layout) TaskKey() string { return filepath.Join(l.TaskKeyDir(), "task-signing.pem") }

// TaskPubkeys is its public half, as agents get it.
func (l Layout) TaskPubkeys() string { return filepath.Join(l.Dir, "keys", "task-signing.pub") }

// AssertionKeyDir holds the key that signs on whose behalf readmodel calls.
func (l Layout) AssertionKeyDir() string { return filepath.Join(l.Dir, "keys", "assertion") }

// AssertionKey is the key itself.
func (l Layout) AssertionKey() string { return filepath.Join(l.AssertionKeyDir(), "assertion.pem") }

// AssertionPubkeys is its public half, as the owners of commands get it.
func (l Layout) AssertionPubkeys() string { return filepath.Join(l.Dir, "keys", "assertion.pub") }

// LifecycleSecret is what lifecycle derives launch secrets and workloads' passwords from.
func (l Layout) LifecycleSecret() string { return filepath.Join(l.Dir, "keys", "lifecycle.secret") }

// WorkloadSecretKeys are the keys that environment values of workloads are sealed under; lifecycle's.
func (l Layout) WorkloadSecretKeys() string {
	return filepath.Join(l.Dir, "keys", "workload-secrets.keys")
}

// PasswordFile holds the password of a database role.
func (l Layout) PasswordFile(role string) string {
	return filepath.Join(l.Dir, "database", role+".password")
}

// URLFile holds the connection string of a database role.
func (l Layout) URLFile(role string) string { return filepath.Join(l.Dir, "database", role+".url") }

// RedisURLFile holds the connection string of Redis.
func (l Layout) RedisURLFile() string { return filepath.Join(l.Dir, "database", "redis.url") }

// ConfigFile is the rendered configuration of a service's process.
func (l Layout) ConfigFile(process string) string {
	return filepath.Join(l.Dir, "config", process+".yaml")
}
