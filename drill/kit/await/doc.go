// Package await waits for conditions, and decides how often a condition is checked, how long one may take that is no
// budget of a drill, and which refusals of a request end the wait for its answer.
//
// It knows no drill and no mesh. An error that is the failure of a stage ends each wait at once.
package await
