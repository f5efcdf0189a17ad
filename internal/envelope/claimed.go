package envelope

// Claimed returns the task id and the attempt in an envelope without verifying them. They may only be used to name the
// task in a refusal; a caller must not act for a task because of them.
//
//nolint:nonamedreturns // two claims and whether there are any
func Claimed(encoded []byte) (taskID string, attempt int32, ok bool) {
	t, err := decode(encoded)
	if err != nil {
		return "", 0, false
	}
	return t.TaskID, t.Attempt, true
}

// ClaimedNode returns the id of the node in an envelope without verifying it. It may only be used to leave a task
// alone.
func ClaimedNode(encoded []byte) (string, bool) {
	t, err := decode(encoded)
	return t.NodeID, err == nil
}
