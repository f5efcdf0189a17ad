// Package identity owns the files that make a host this node: its keys and certificates, its join state, its endpoints
// and the material it trusts. It is the only writer of them.
//
// It has two directories. In etc (`/etc/gpuaas`):
//
//	node-agent.env           endpoints, token, task verifiers (kept up to date by sessions); 0600, read by the agent
//	                         itself and never through its process environment
//	ca-bundle.crt            trusts the node API
//	recovery-ca-bundle.crt   trusts the enrolment listener; defaults to ca-bundle.crt
//	cert.pem, key.pem        the slot in use
//	cert-next.pem, key-next.pem  the other slot: a certificate not yet used, or the one used before
//	key-pending.pem          the key of a request with an operator's token on its way
//	key-renewing.pem         the key of a renewal on its way
//
// In state (`/var/lib/gpuaas`):
//
//	lock                     locked while the directory is in use, with the pid of the agent
//	node.json                node_id, node_instance_id, workspace and epoch of an instance, policy
//	join-state.json          generation and signed join state
//	service-roots.json       of a trust bundle that a list of roots has changed: which roots were given to this host
//	former-profile.json      the profile before an offered one, until a session is admitted over the offered one
//	recovery-key.pem         the key of this node to which its recovery tokens are bound
//	key-recovering.pem       the key of a recovery's request on its way
//	recovery-tokens.json     the recovery token before the newest, until the newest counts; the newest itself is in
//	                         node-agent.env, or here while an operator's token is there
//	before-bundle.json       endpoints and trust from before the last operator's bundle, with which RestoreFormer puts
//	                         them back, until an offered profile takes their place
//	journal.json             a change of several files that is decided and perhaps not yet wholly applied
//
// It believes the files on its disk and the replies of a verified server. It never mints credentials: it makes keys and
// certificate requests. It never sends anything (package enrol and package session do).
//
// Guarantees. Everything it writes is 0600, synced, and its directory synced, before a call returns. A change of one
// file is a rename. A change of several files is first written as one record, the intent log journal.json, which
// decides it; then it is applied, and then the record is removed. Open applies a record that a crash left. So after a
// crash between any two syncs the directory is as it was before the call or as it is after it: the same node, with a
// key for each certificate. A key is on disk before its request leaves, and requests use the same key until one is
// answered or refused for good. A file that is replaced (certificate, trust, join state) stays until its successor is
// durable; the generation of the join state only grows within one node instance.
package identity
