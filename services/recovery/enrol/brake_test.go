package enrol_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// TestTheBrakeStopsNoEnrolmentThatProvesItsKey: while the fleet brake is engaged a machine enrols with an operator's
// token, and one recovers with its recovery token; a text that is no token of ours is told to wait.
func TestTheBrakeStopsNoEnrolmentThatProvesItsKey(t *testing.T) {
	k := newKit(t)
	m := k.enrolled("node-1")
	late := k.bootstrap("node-2")
	k.exec(`UPDATE recovery.brake SET engaged = true, since = mesh.clock()`)
	m.mustRecover(k.csr())
	k.mustEnroll(late.Token, k.csr())
	_, err := k.enroll("gbt_unknown", k.csr())
	k.refused(err, commonv1.Reason_REASON_RECORDS_MISSING)
}
