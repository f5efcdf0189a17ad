-- +goose Up

-- Up to which time a service has judged everything that it judges. It is written by that service alone, a few times a minute and in place, and read by those
-- who show its verdicts.
CREATE TABLE IF NOT EXISTS mesh.judged (service text PRIMARY KEY, through timestamptz NOT NULL);

GRANT SELECT ON mesh.judged TO readmodel, recovery;
GRANT INSERT, UPDATE, DELETE ON mesh.judged TO recovery;
ALTER TABLE mesh.judged ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS readable ON mesh.judged;
CREATE POLICY readable ON mesh.judged FOR SELECT USING (true);
DROP POLICY IF EXISTS own_row ON mesh.judged;
CREATE POLICY own_row ON mesh.judged FOR INSERT WITH CHECK (service = current_user::text);
DROP POLICY IF EXISTS own_change ON mesh.judged;
CREATE POLICY own_change ON mesh.judged FOR UPDATE USING (service = current_user::text);
DROP POLICY IF EXISTS own_end ON mesh.judged;
CREATE POLICY own_end ON mesh.judged FOR DELETE USING (service = current_user::text);

-- +goose Down
DROP TABLE IF EXISTS mesh.judged;
