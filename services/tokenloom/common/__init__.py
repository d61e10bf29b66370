"""What every stage needs: settings, errors, server start and stop, telemetry. No domain logic."""
