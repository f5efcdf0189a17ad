package judge

import (
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Recovery is the decision about a node that enrols with a recovery token.
type Recovery struct {
	// Continue is set if the node keeps its node instance, its generation and its gate: it is the same host, and only its
	// certificate is new. Otherwise the node becomes a new node instance.
	Continue bool
	// Reason is why the enrolment is refused; unspecified: it is not.
	Reason commonv1.Reason
}

// Recover decides about a node that enrols with a recovery token, by the join state that it presents. The caller
// has proved the recovery key. A join state with which the node could open a session lets it continue. An old
// generation is a copy's, or a host's whose disk was put back, and is refused; no node is put on hold for it, since a
// request that was delayed may be as old, and no challenge can be sent here. A node that presents it at a session is
// challenged there.
//
//	presented                                  | verdict
//	confirmed ≤ p, validly signed              | continue
//	absent, and nothing was ever confirmed     | continue
//	absent later, unreadable, of another life  | a new node instance
//	signed by a key that this replica lacks    | wait: signing_key_unknown
//	p < confirmed                              | refused: cloned_identity_detected
func Recover(s Standing, p Presented) Recovery {
	switch p.Form {
	case FormSigned:
		if p.Generation < s.Confirmed && p.Era <= s.Era {
			return Recovery{Reason: commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED}
		}
		return Recovery{Continue: true}
	case FormUnknownKey:
		return Recovery{Reason: commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN}
	case FormAbsent:
		return Recovery{Continue: s.Confirmed == 0}
	case FormForeign, FormUnreadable:
	}
	return Recovery{}
}
