package saga

// Cancellable reports whether the definition of a run lets it be cancelled, whatever its state. It returns true for a
// run whose definition this build does not have: Cancel marks the run for the build that drives it.
func (c *Core) Cancellable(r *Run) bool {
	def, known := c.registry.Get(r.Definition, r.DefVersion)
	return !known || !def.Uncancellable
}
