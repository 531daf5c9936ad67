"""Property tests have no deadline: how long an example takes says more about what else the machine does."""
import hypothesis

hypothesis.settings.register_profile("tkq", deadline=None)
hypothesis.settings.load_profile("tkq")
