package runs

// SameTry is the condition that an attempt p of the step of an attempt s belongs to the same try: between them there
// are only attempts whose drivers were lost. A step that hangs and takes its worker with it has been hanging since its
// first such attempt, not since the next worker began to wait for it.
//
// Scenario: saga-step-wedged.
func SameTry(p string) string {
	return p + `.attempt > COALESCE((SELECT max(q.attempt) FROM lifecycle.saga_step q
		WHERE q.run_id = s.run_id AND q.step = s.step AND q.dir = s.dir AND q.attempt < s.attempt AND q.state <> 'lost'), 0)`
}
