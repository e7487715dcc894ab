<prompt schema="persona">
  <child/><brief/><warm/>
  <user>Why does the moon change its shape?</user>
</prompt>

<prompt schema="persona">
  <adult/><thorough/><dry/>
  <user>How do libraries decide which books they give away?</user>
</prompt>

<prompt schema="persona">
  <scholar/><thorough/><warm/>
  <user>How was paper made before machines?</user>
</prompt>
