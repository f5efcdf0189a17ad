// Package material makes what a mesh needs besides its programs: the authorities, the services' certificates, signing
// keys with their public halves, database passwords, and the files in which each service finds them.
//
// It owns the layout of one directory and keeps what already exists there: no existing file is made anew, except a
// service's certificate that is near its end or lacks a host. It never contacts a server, and it starts nothing.
// Guarantees: Make may be run any number of times and by several processes at once; every file is on disk before Make
// returns and no secret is readable by another user.
package material

import (
	"path/filepath"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// Names of the services, as their certificates and roles spell them.
const (
	NodeAPI   = "nodeapi"
	Lifecycle = "lifecycle"
	Recovery  = "recovery"
	Readmodel = "readmodel"
)

// Services returns all services, in the order in which they are started.
func Services() []string { return []string{Recovery, Lifecycle, NodeAPI, Readmodel} }

// Layout gives the paths of everything below one directory.
type Layout struct{ Dir string }

// ServiceCADir returns the directory of the issuer of services, with its key.
func (l Layout) ServiceCADir() string { return filepath.Join(l.Dir, "service-ca") }

// ServiceRoots returns the PEM file of the issuer of services, without its key, which agents and clients trust.
func (l Layout) ServiceRoots() string { return filepath.Join(l.ServiceCADir(), ca.RootsFile) }

// NodeCADir returns the directory of the node authority with its keys.
func (l Layout) NodeCADir() string { return filepath.Join(l.Dir, "node-ca") }

// NodeRoots returns the PEM file of the node authority's root, which the agents' port trusts.
func (l Layout) NodeRoots() string { return filepath.Join(l.NodeCADir(), ca.RootsFile) }

// Identity returns the PEM file of a service's key and certificate.
func (l Layout) Identity(service string) string {
	return filepath.Join(l.Dir, "identity", service, pki.IdentityFile)
}

// Trust returns the PEM file of the issuer by which a service verifies its peers.
func (l Layout) Trust(service string) string {
	return filepath.Join(l.Dir, "identity", service, pki.BundleFile)
}

// JoinStateKeyDir returns the directory of the private keys of join states; recovery's.
func (l Layout) JoinStateKeyDir() string { return filepath.Join(l.Dir, "keys", "join-state") }

// JoinStatePubkeys returns the file of their public keys.
func (l Layout) JoinStatePubkeys() string { return filepath.Join(l.Dir, "keys", "join-state.pub") }

// TaskKeyDir returns the directory of the key that signs tasks; lifecycle's.
func (l Layout) TaskKeyDir() string { return filepath.Join(l.Dir, "keys", "task-signing") }

// TaskKey returns the file of that key.
func (l Layout) TaskKey() string { return filepath.Join(l.TaskKeyDir(), "task-signing.pem") }

// TaskPubkeys returns the file of its public key, as agents get it.
func (l Layout) TaskPubkeys() string { return filepath.Join(l.Dir, "keys", "task-signing.pub") }

// AssertionKeyDir returns the directory of the key that signs readmodel's assertions of the person it calls for.
func (l Layout) AssertionKeyDir() string { return filepath.Join(l.Dir, "keys", "assertion") }

// AssertionKey returns the file of that key.
func (l Layout) AssertionKey() string { return filepath.Join(l.AssertionKeyDir(), "assertion.pem") }

// AssertionPubkeys returns the file of its public key, as the owners of commands get it.
func (l Layout) AssertionPubkeys() string { return filepath.Join(l.Dir, "keys", "assertion.pub") }

// LifecycleSecret returns the file of the secret from which lifecycle derives launch secrets and workloads' passwords.
func (l Layout) LifecycleSecret() string { return filepath.Join(l.Dir, "keys", "lifecycle.secret") }

// WorkloadSecretKeys returns the file of lifecycle's keys, under which environment values of workloads are sealed.
func (l Layout) WorkloadSecretKeys() string {
	return filepath.Join(l.Dir, "keys", "workload-secrets.keys")
}

// PasswordFile returns the file of the password of a database role.
func (l Layout) PasswordFile(role string) string {
	return filepath.Join(l.Dir, "database", role+".password")
}

// URLFile returns the file of the connection string of a database role.
func (l Layout) URLFile(role string) string { return filepath.Join(l.Dir, "database", role+".url") }

// RedisURLFile returns the file of the connection string of Redis.
func (l Layout) RedisURLFile() string { return filepath.Join(l.Dir, "database", "redis.url") }

// ConfigFile returns the file of the rendered configuration of a service's process.
func (l Layout) ConfigFile(process string) string {
	return filepath.Join(l.Dir, "config", process+".yaml")
}
