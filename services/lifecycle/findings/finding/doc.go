// Package finding keeps findings: it opens one, counts it as seen again and resolves it, each with its event and its
// entry in the audit log, and cordons the finding's node as long as the finding is open.
//
// It does not decide what is a finding. The caller has taken the turn (TakeTurn) in the same transaction.
package finding
