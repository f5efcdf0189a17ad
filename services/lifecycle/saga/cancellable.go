package saga

// Cancellable reports whether the definition of a run lets it be cancelled, whatever its state. A run whose definition this build does not know is taken
// as such: Cancel marks it for the build that drives it.
func (c *Core) Cancellable(r *Run) bool {
	def, known := c.registry.Get(r.Definition, r.DefVersion)
	return !known || !def.Uncancellable
}
