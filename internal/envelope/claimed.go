package envelope

// Claimed returns which task and attempt an envelope says it is, without believing it: only to name a refusal. Nothing may be done for a task on
// the strength of it.
func Claimed(encoded []byte) (taskID string, attempt int32, ok bool) { //nolint:nonamedreturns // two claims and whether there are any
	t, err := decode(encoded)
	if err != nil {
		return "", 0, false
	}
	return t.TaskID, t.Attempt, true
}

// ClaimedNode returns which node an envelope says that it is for. Nobody has vouched for it: it may only be used to leave a task alone.
func ClaimedNode(encoded []byte) (string, bool) {
	t, err := decode(encoded)
	return t.NodeID, err == nil
}
