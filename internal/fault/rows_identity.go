package fault

import (
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

var identityRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_IDENTITY_MISMATCH: {
		Code: connect.CodePermissionDenied, Action: stop, Owner: ownerSecurity,
		Public: "the certificate belongs to another node than the message claims",
		Remedy: "check which state directory this agent runs on; a copied one needs a new identity",
		Impact: "this connection is refused; the node that was named is untouched",
	},
	commonv1.Reason_REASON_IDENTITY_HELD: {
		Code: connect.CodePermissionDenied, Action: wait, RetryAfter: 3 * time.Second, Owner: ownerRecovery,
		Public: "the node's identity is on hold",
		Remedy: "look at the node's verdict; reactivate it, or have a person with the security role fence it if it was " +
			"copied",
		Impact: "the node gets no work; its running workloads go on",
	},
	commonv1.Reason_REASON_IDENTITY_QUARANTINED: {
		Code: connect.CodePermissionDenied, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerOperator,
		Public: "the node is quarantined by an operator",
		Remedy: "`gpuaas nodes reactivate NODE --reason TEXT` when it is cleared",
		Impact: "the node gets no work; its running workloads go on",
	},
	commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED: {
		Code: connect.CodePermissionDenied, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerSecurity,
		Public: "the node's identity is revoked or fenced",
		Remedy: "a person with the security role reactivates it; to enrol it anew, issue a bundle then " +
			"(`gpuaas nodes bundle NODE`)",
		Impact: "the node gets no work and no session; its running workloads go on",
	},
	commonv1.Reason_REASON_IDENTITY_RETIRED: {
		Code: connect.CodePermissionDenied, Action: stop, Owner: ownerOperator,
		Public: "the node's identity is retired for good",
		Remedy: "enrol the machine as a new node",
		Impact: "this identity never gets work again",
	},
	commonv1.Reason_REASON_IDENTITY_UNKNOWN: {
		Code: connect.CodePermissionDenied, Action: rebundle, RetryAfter: time.Minute, Owner: ownerOperator,
		Public: "no node of that identity is known here",
		Remedy: "enrol the machine with a bundle of this mesh (`gpuaas nodes enroll`; `gpuaas nodes bundle NODE` if it " +
			"is a node here)",
		Impact: "the machine is not part of this mesh",
	},
	commonv1.Reason_REASON_SERIAL_SUPERSEDED: {
		Code: connect.CodePermissionDenied, Action: renew, Owner: ownerAgent,
		Public: "this certificate was issued but another one is in use",
		Remedy: "use the other certificate held, else recover with the recovery token",
		Impact: "this certificate opens nothing; the node's identity is untouched",
	},
	commonv1.Reason_REASON_SERIAL_UNKNOWN: {
		Code: connect.CodePermissionDenied, Action: recov, RetryAfter: 5 * time.Second, Owner: ownerRecovery,
		Public: "this certificate was not issued by this mesh to this node",
		Remedy: "recover with the recovery token; if that is refused, issue a bundle (`gpuaas nodes bundle NODE`)",
		Impact: "this certificate opens nothing",
	},
	commonv1.Reason_REASON_CERTIFICATE_INVALID: {
		Code: connect.CodePermissionDenied, Action: recov, RetryAfter: 5 * time.Second, Owner: ownerAgent,
		Public: "the certificate has not exactly one URI name of this trust domain, or may not be used as a leaf",
		Remedy: "obtain a certificate from this mesh's authority",
		Impact: "this certificate opens nothing",
	},
	commonv1.Reason_REASON_CERTIFICATE_EXPIRED: {
		Code: connect.CodeUnauthenticated, Action: recov, Owner: ownerAgent,
		Public: "the certificate has expired",
		Remedy: "use the other certificate held, else recover with the recovery token; without one, issue a bundle " +
			"(`gpuaas nodes bundle NODE`)",
		Impact: "the node has no session until it has a fresh certificate; its workloads go on",
	},
	commonv1.Reason_REASON_CSR_REFUSED: {
		Code: connect.CodeInvalidArgument, Action: stop, Owner: ownerAgent,
		Public: "the certificate request is not one that may be signed",
		Remedy: "send a P-256 or Ed25519 key of your own with a valid signature and no extensions",
		Impact: "only this request: nothing was issued and no token was used",
	},
	commonv1.Reason_REASON_KEY_REUSE: {
		Code: connect.CodePermissionDenied, Action: recov, RetryAfter: 5 * time.Second, Owner: ownerSecurity,
		Public: "the key of the certificate request certifies another node",
		Remedy: "make a new key and ask again; find out how this machine came to the key of another",
		Impact: "only this request: nothing was issued and no token was used",
	},
	commonv1.Reason_REASON_TOKEN_INVALID: {
		Code: connect.CodePermissionDenied, Action: rebundle, RetryAfter: time.Minute, Owner: ownerOperator,
		Public: "the token is not one that this mesh issued for this purpose",
		Remedy: "issue a fresh bundle for the node: `gpuaas nodes bundle NODE`, or `gpuaas nodes enroll` for a new machine",
		Impact: "only this request: no token was used",
	},
	commonv1.Reason_REASON_TOKEN_EXPIRED: {
		Code: connect.CodePermissionDenied, Action: rebundle, RetryAfter: time.Minute, Owner: ownerOperator,
		Public: "the token has expired",
		Remedy: "issue a fresh bundle for the node: `gpuaas nodes bundle NODE`, or `gpuaas nodes enroll` for a new machine",
		Impact: "the node cannot enrol by itself; its workloads go on",
	},
	commonv1.Reason_REASON_TOKEN_CONSUMED: {
		Code: connect.CodePermissionDenied, Action: rebundle, RetryAfter: time.Minute, Owner: ownerSecurity,
		Public: "the token was used before with another key",
		Remedy: "find out who used it; then a person with the security role reactivates the node, and a fresh bundle " +
			"(`gpuaas nodes bundle NODE`) brings it back",
		Impact: "the token's family is revoked and an alarm is raised",
	},
	commonv1.Reason_REASON_TOKEN_NOT_YET_VALID: {
		Code: connect.CodePermissionDenied, Action: wait, RetryAfter: 30 * time.Second, Owner: ownerRecovery,
		Public: "the token is not valid yet",
		Remedy: "wait until its time; check the clock of its issuer",
		Impact: "only this request: no token was used",
	},
	commonv1.Reason_REASON_JOIN_STATE_LOST: {
		Code: connect.CodeFailedPrecondition, Action: recov, RetryAfter: 5 * time.Second, Owner: ownerAgent,
		Public: "the node's join state is missing or unreadable",
		Remedy: "recover with the recovery token, or issue a bundle (`gpuaas nodes bundle NODE`)",
		Impact: "the node is on hold and gets no work; this is no sign of a copy",
	},
	commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerControl,
		Public: "the signature is of a key that this replica of the control plane does not hold",
		Remedy: "`gpuaas incidents list` names the key and the replica; copy the key's file to that replica",
		Impact: "the node waits and is not put on hold; its workloads go on",
	},
	commonv1.Reason_REASON_KEY_ROTATION_UNDER_WAY: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: time.Minute, Owner: ownerSecurity,
		Public: "a key of this kind was rotated lately and the rotation is not over",
		Remedy: "`gpuaas keys list` shows what it waits for; ask again then",
		Impact: "nothing: the keys stay as they are",
	},
	commonv1.Reason_REASON_SIGNING_KEYS_DIFFER: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "the keys in the files of this replica are not those of the mesh",
		Remedy: "copy the file that is named from a replica that holds it",
		Impact: "the replica does not start; the others serve",
	},
	commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerControl,
		Public: "this replica of the control plane could not read for long whether its key still signs",
		Remedy: "wait: it goes on once it reads the database; if it does not, `gpuaas keys list` names the key and its file",
		Impact: "this replica signs nothing; the others do",
	},
	commonv1.Reason_REASON_DATABASE_SEEDED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "the fleet in the database was loaded by a bench",
		Remedy: "use the mesh's own database; to run services on this one, set seeded_database in their configuration",
		Impact: "the service does not start: nothing was read or changed",
	},
	commonv1.Reason_REASON_TASK_KEY_NOT_HELD: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 2 * time.Second, Owner: ownerControl,
		Public: "the agent has not stored yet the key by which tasks are signed now",
		Remedy: "wait: it is sent the key in its session; if it refuses it, `gpuaas nodes get` has its diagnostic",
		Impact: "the node gets no new task until then; its workloads go on",
	},
	commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED: {
		Code: connect.CodePermissionDenied, Action: stop, Owner: ownerSecurity,
		Public: "two holders of this node's identity have shown themselves",
		Remedy: "fence the node, find the copy, enrol the real machine with a new identity",
		Impact: "both holders are on hold and get no work",
	},
	commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 30 * time.Second, Owner: ownerControl,
		Public: "the control plane's database is older than what nodes or the launch log remember",
		Remedy: "follow docs/restore.md: look at `gpuaas rollback status`, then `gpuaas rollback accept --reason TEXT`",
		Impact: "nothing is launched, dispatched, recreated, released or put on hold until it is accepted; workloads go on",
	},
	commonv1.Reason_REASON_RECORDS_MISSING: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 30 * time.Second, Owner: ownerControl,
		Public: "the control plane lacks records of many nodes at once and suspects itself",
		Remedy: "find out what recovery has lost: `gpuaas brake status`, `gpuaas incidents list`; nodes come back by " +
			"themselves once their records are back",
		Impact: "the node has no session meanwhile and is neither refused for good nor put on hold; its workloads go on",
	},
	commonv1.Reason_REASON_RECORD_UNREADABLE: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 30 * time.Second, Owner: ownerControl,
		Public: "a record of this node has a value that this build of the control plane does not know",
		Remedy: "update this replica to the build that wrote the value",
		Impact: "the node gets no new work and is not put on hold; all other nodes are served",
	},
	commonv1.Reason_REASON_CERTIFICATE_UNTRUSTED: {
		Code: connect.CodeUnauthenticated, Action: recov, Owner: ownerRecovery,
		Public: "the issuer of the certificate is not among those that the ingress trusts",
		Remedy: "compare what the ingress trusts with what the authority signs (`gpuaas status`); repair that side first, " +
			"then let the node recover",
		Impact: "the node has no session; its workloads go on",
	},
	commonv1.Reason_REASON_AUTO_RECOVERY_OFF: {
		Code: connect.CodeFailedPrecondition, Action: rebundle, Owner: ownerOperator,
		Public: "the policy lets only an operator's bundle bring a node back",
		Remedy: "issue a bundle for the node (`gpuaas nodes bundle NODE`), or set node.auto_recovery to true: its agent " +
			"asks within an hour",
		Impact: "the node has no session; its workloads go on",
	},
	commonv1.Reason_REASON_RECOVERY_LIMIT_REACHED: {
		Code: connect.CodeResourceExhausted, Action: wait, RetryAfter: 10 * time.Minute, Owner: ownerRecovery,
		Public: "the node has recovered as often in this hour as the policy allows",
		Remedy: "look at why its certificates do not last; the limit is node.recovery_attempts_per_hour",
		Impact: "the node has no session until then; its workloads go on",
	},
	commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING: {
		Code: connect.CodePermissionDenied, Action: rebundle, Owner: ownerOperator,
		Public: "the node has no recovery token, or has lost the key that proves it",
		Remedy: "issue a bundle: `gpuaas nodes bundle NODE`",
		Impact: "the node gets no certificate and no work; its workloads go on",
	},
	commonv1.Reason_REASON_CHALLENGE_FAILED: {
		Code: connect.CodePermissionDenied, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerNodeapi,
		Public: "the challenge was not answered in time or not by this node's key",
		Remedy: "reconnect; if it stays, check the agent's clock and state directory",
		Impact: "this stream is closed; the node's other session stands",
	},
	commonv1.Reason_REASON_MINT_CONSUMED: {
		Code: connect.CodePermissionDenied, Action: wait, RetryAfter: 10 * time.Second, Owner: ownerRecovery,
		Public: "the launch secret of this instance is in use by another key of the same instance",
		Remedy: "wait: the gate opens again for the current epoch if the first key never becomes ready",
		Impact: "the workspace waits for its instance; the count is shown on the workspace",
	},
	commonv1.Reason_REASON_ENROLLMENT_IN_FLIGHT: {
		Code: connect.CodeAborted, Action: wait, RetryAfter: 2 * time.Second, Owner: ownerRecovery,
		Public: "another enrolment of this node is under way",
		Remedy: "ask again after the given time with the same key",
		Impact: "only this request: the other one goes on",
	},
	commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 10 * time.Second, Owner: ownerControl,
		Public: "the certificate authority does not answer or is stopped",
		Remedy: "`gpuaas status` shows what is wrong; nodes wait by themselves",
		Impact: "no certificates are issued; open sessions and workloads go on",
	},
}

var sessionRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_SESSION_SUPERSEDED: {
		// The wait is short on purpose: a second copy of the agent is detected when it connects again.
		Code: connect.CodeAborted, Action: wait, RetryAfter: time.Second, Owner: ownerAgent,
		Public: "a newer session of this node was admitted",
		Remedy: "reconnect within two seconds unless the newer session is your own",
		Impact: "this stream is closed; the newer one gets the work",
	},
	commonv1.Reason_REASON_SESSION_UNKNOWN: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: time.Second, Owner: ownerAgent,
		Public: "no session of that id is open here",
		Remedy: "open a new session",
		Impact: "only this stream",
	},
	commonv1.Reason_REASON_EPOCH_SUPERSEDED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerLifecycle,
		Public: "a later epoch of this workspace exists: this instance has been replaced",
		Remedy: "stop this instance; its successor has the workspace",
		Impact: "this instance only; the workspace lives on in its successor",
	},
	commonv1.Reason_REASON_STREAM_MAX_AGE: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: time.Second, Owner: ownerNodeapi,
		Public: "the stream has reached its greatest age",
		Remedy: "open a new connection",
		Impact: "none: the replacement is opened first",
	},
	commonv1.Reason_REASON_SERVER_DRAINING: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: time.Second, Owner: ownerNodeapi,
		Public: "this replica is shutting down",
		Remedy: "reconnect, to another replica, with jitter",
		Impact: "none: sessions move to other replicas",
	},
	commonv1.Reason_REASON_AUTHORITY_STALE: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: time.Second, Owner: ownerControl,
		Public: "this replica's view of holds and fences is too old to decide by",
		Remedy: "wait; look at recovery and its database if it stays",
		Impact: "nothing is offered and results are held; streams and workloads go on",
	},
	commonv1.Reason_REASON_HEARTBEAT_LATE: {
		Code: connect.CodeDeadlineExceeded, Action: wait, RetryAfter: time.Second, Owner: ownerAgent,
		Public: "no heartbeat came within the allowed time",
		Remedy: "reconnect; look at the host's load and network if it repeats",
		Impact: "this stream is closed; the node's workloads go on",
	},
	commonv1.Reason_REASON_SLOW_CONSUMER: {
		Code: connect.CodeResourceExhausted, Action: wait, RetryAfter: 2 * time.Second, Owner: ownerAgent,
		Public: "the peer read too slowly and its bounded queue is full",
		Remedy: "reconnect; look at the host's load and network if it repeats",
		Impact: "this stream is closed; what was queued is sent again",
	},
	commonv1.Reason_REASON_NODE_NOT_ADMITTED: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: 2 * time.Second, Owner: ownerLifecycle,
		Public: "the node's gate is shut, or another session holds it",
		Remedy: "wait for admission; reactivate the node if it is held or fenced",
		Impact: "no work for this node; results are kept as late evidence and sent again",
	},
	commonv1.Reason_REASON_FENCE_SUPERSEDED: {
		Code: connect.CodeAborted, Action: stop, Owner: ownerRecovery,
		Public: "a later fence has been applied to this node already",
		Remedy: "nothing: the later decision stands",
		Impact: "none",
	},
}
