-- Numbers of a sequence are given out before a commit, so that a higher one can be seen before a lower one. Whoever adds an
-- event therefore waits until nobody else has one of the same tenant that is not committed, and only then takes a number.
CREATE FUNCTION events_in_turn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('cove events ' || NEW.tenant, 0));
    NEW.seq := nextval(pg_get_serial_sequence(quote_ident(TG_TABLE_SCHEMA) || '.events', 'seq'));
    RETURN NEW;
END $$;
CREATE TRIGGER events_in_turn BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION events_in_turn();
